//! Who does not belong is refused with one line, and the job goes on.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::time::{Duration, Instant};

use learner::collectives::{Collectives, Liveness, PROTOCOL, Reduction, RendezvousError, TcpCollectives, join};
use learner::wire::Token;
use proptest::prelude::*;

use crate::support::{CALM, Notices, free_ports, on_ranks, rendezvous, wait_until};

/// Throws bytes at a port and leaves once it is hung up on, or after a moment.
fn throw(port: u16, bytes: &[u8]) {
    let Ok(mut stream) = TcpStream::connect(("127.0.0.1", port)) else { return };
    stream.set_read_timeout(Some(Duration::from_millis(50))).expect("a timeout");
    // The port may hang up at any byte.
    let _ = stream.write_all(bytes);
    let _ = stream.read(&mut [0; 256]);
}

fn hello(version: u32) -> Vec<u8> {
    [&b"LEARNER\0"[..], &version.to_le_bytes(), &[7; 32]].concat()
}

fn works(place: &TcpCollectives) {
    let mut values = [1.0f32; 5];
    place.all_reduce(&mut values, Reduction::Sum).expect("the job goes on");
    assert_eq!(values, [place.world_size() as f32; 5]);
}

fn lines(notices: &Notices) -> Vec<String> {
    notices.lock().expect("a list").clone()
}

/// Garbage at all ports while a world of two meets and while it works, with the same world at the end.
fn survives(garbage: &[Vec<u8>]) -> Vec<String> {
    let port = free_ports(2);
    let ((first, notices), (second, _)) = (rendezvous(port, 0, 2, CALM), rendezvous(port, 1, 2, CALM));
    let places = std::thread::scope(|scope| {
        let first = scope.spawn(|| join(&first));
        wait_until("the coordinator", || TcpStream::connect(("127.0.0.1", port)).is_ok());
        garbage.iter().for_each(|bytes| throw(port, bytes));
        let second = scope.spawn(|| join(&second));
        [first, second].map(|thread| thread.join().expect("a rank").expect("a world"))
    });
    on_ranks(places.into(), |place| {
        works(&place);
        if place.rank() == 0 {
            garbage.iter().for_each(|bytes| {
                throw(port, bytes);
                throw(port + 1, bytes);
            });
        }
        works(&place);
    });
    lines(&notices)
}

#[test]
fn known_kinds_of_garbage_get_one_line_each() {
    let said = survives(&[b"GET / HTTP/1.1\r\nHost: node-0\r\n\r\n".to_vec()]);
    assert_eq!(said.len(), 2, "{said:?}");
    assert!(
        said[0].starts_with("127.0.0.1:") && said[0].ends_with(" was refused: it does not speak this program's protocol"),
        "{said:?}"
    );
    let said = survives(&[hello(PROTOCOL + 1)]);
    assert!(
        said[0].contains("it speaks version 3 of the protocol, this rank version 2: start the same build everywhere"),
        "{said:?}"
    );
    // Who only looks whether the port is open is no news.
    assert_eq!(survives(&[vec![]]), Vec::<String>::new());
    // A hello without a request, a request that claims to be huge, a request without a proof.
    let request = br#"{"run_id":"test","rank":1,"purpose":{"Join":{"world_size":2,"host":"evil"}}}"#;
    let forged = [&hello(PROTOCOL)[..], &(request.len() as u32).to_le_bytes(), request, &[0; 32]].concat();
    let huge = [&hello(PROTOCOL)[..], &u32::MAX.to_le_bytes()].concat();
    let said = survives(&[hello(PROTOCOL), forged, huge]);
    assert!(said.iter().any(|line| line.ends_with("was refused: it has another token than this rank")), "{said:?}");
    assert!(said.iter().any(|line| line.ends_with("was refused: a message of 4294967295 bytes, 4096 at most")), "{said:?}");
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 6, failure_persistence: None, ..ProptestConfig::default() })]
    #[test]
    fn no_garbage_harms_a_job(
        garbage in proptest::collection::vec((proptest::collection::vec(any::<u8>(), 0..200), 0usize..48), 1..12)
    ) {
        // Some of it begins as a real caller does.
        let dressed = |(bytes, genuine): (Vec<u8>, usize)| {
            let mut hello = hello(PROTOCOL);
            hello.truncate(genuine);
            hello.extend(bytes);
            hello
        };
        let garbage: Vec<Vec<u8>> = garbage.into_iter().map(dressed).collect();
        survives(&garbage);
    }
}

#[test]
fn impostors_get_one_line_each_and_the_job_begins_without_them() {
    let port = free_ports(3);
    let (first, notices) = rendezvous(port, 0, 3, CALM);
    let settings = |rank: usize| rendezvous(port, rank, 3, CALM).0;
    std::thread::scope(|scope| {
        let coordinator = scope.spawn(|| join(&first));
        let second = scope.spawn(|| join(&settings(1)));
        let refused = |rank: usize, change: &dyn Fn(&mut learner::collectives::Rendezvous)| {
            let mut impostor = settings(rank);
            impostor.host = "elsewhere".into();
            change(&mut impostor);
            join(&impostor).err().expect("refused").to_string()
        };
        let at = format!("the coordinator at 127.0.0.1:{port}");

        let line = refused(2, &|impostor| impostor.token = Token::new("a token that is guessed").expect("a token"));
        assert_eq!(line, format!("{at} has another token than rank 2: give all ranks the same one"));
        let line = refused(2, &|impostor| impostor.run_id = "another".into());
        let expected =
            "this port belongs to run \"test\", not to run \"another\": give each job a port of its own with --coordinator";
        assert_eq!(line, format!("{at} refuses rank 2: {expected}"));
        let line = refused(2, &|impostor| impostor.world_size = 4);
        assert_eq!(
            line,
            format!(
                "{at} refuses rank 2: it counts 4 ranks, the coordinator 3: start all nodes with the same --nodes and --gpus-per-node"
            )
        );
        let line = refused(3, &|impostor| impostor.world_size = 3);
        assert_eq!(line, "rank 3 of a world of 3: ranks count from 0");
        // A second job whose rank 0 finds the port taken, and one whose rank 1 finds this job's port.
        let line = refused(0, &|_| {});
        assert!(line.starts_with(&format!("port {port} of this host cannot be opened for rank 0 (")), "{line}");

        let third = scope.spawn(|| join(&settings(2)));
        let places = [coordinator, second, third].map(|thread| thread.join().expect("a rank").expect("a world"));
        on_ranks(places.into(), |place| {
            works(&place);
            place.barrier().expect("all");
        });
    });
    let said = lines(&notices);
    assert_eq!(said.iter().filter(|line| line.contains("another token")).count(), 1, "{said:?}");
    assert_eq!(said.iter().filter(|line| line.contains("belongs to run")).count(), 1, "{said:?}");
    assert_eq!(said.iter().filter(|line| line.contains("it counts 4 ranks")).count(), 1, "{said:?}");
}

#[test]
fn a_rank_that_comes_late_is_refused() {
    let port = free_ports(3);
    let (first, second) = (rendezvous(port, 0, 2, CALM).0, rendezvous(port, 1, 2, CALM).0);
    let places = on_ranks(vec![first, second.clone()], |settings| join(&settings).expect("a world"));
    // It asks again for as long as that world might be one that is about to end.
    let soon = Liveness { dead_after_seconds: 3.0, ..CALM };
    let line = join(&rendezvous(port, 2, 3, soon).0).err().expect("refused").to_string();
    let expected = "run \"test\" has all its 2 ranks already";
    assert_eq!(line, format!("the coordinator at 127.0.0.1:{port} refuses rank 2: {expected}"));
    // On the host of rank 1 already its port is taken.
    let line = join(&second).err().expect("refused").to_string();
    assert!(line.starts_with(&format!("port {} of this host cannot be opened for rank 1", port + 1)), "{line}");
    on_ranks(places, |place| works(&place));
}

/// Two of a machine's loopback addresses take the part of two hosts.
#[test]
#[cfg(target_os = "linux")]
fn a_rank_that_two_hosts_claim_stays_with_the_first() {
    let port = free_ports(3);
    let at = |host: &str, rank: usize| {
        let mut settings = rendezvous(port, rank, 3, CALM).0;
        settings.coordinator = format!("{host}:{port}");
        settings
    };
    std::thread::scope(|scope| {
        let coordinator = scope.spawn(|| join(&at("0.0.0.0", 0)));
        let second = scope.spawn(|| join(&at("127.0.0.1", 1)));
        // Open before it has joined, but by then the other has long been on its way.
        wait_until("the port of rank 1", || TcpStream::connect(("127.0.0.1", port + 1)).is_ok());
        std::thread::sleep(Duration::from_secs(2));
        let line = join(&at("127.0.0.2", 1)).err().expect("refused").to_string();
        let expected = "rank 1 is on host host-1 already: two nodes have the same --node-rank";
        assert_eq!(line, format!("the coordinator at 127.0.0.2:{port} refuses rank 1: {expected}"));
        let third = scope.spawn(|| join(&at("127.0.0.1", 2)));
        let places = [coordinator, second, third].map(|thread| thread.join().expect("a rank").expect("a world"));
        on_ranks(places.into(), |place| {
            works(&place);
            place.barrier().expect("all");
        });
    });
}

#[test]
fn who_is_missing_and_who_came_is_said_to_all() {
    let port = free_ports(5);
    let soon = |rank| {
        let mut settings = rendezvous(port, rank, 5, CALM).0;
        // The ranks that come need their time too.
        settings.wait = Duration::from_secs(if rank == 0 { 4 } else { 60 });
        settings
    };
    let start = Instant::now();
    let results = on_ranks(vec![soon(0), soon(1), soon(3)], |settings| join(&settings).err().expect("not whole"));
    let expected = format!(
        "of 5 ranks, 2 did not come to 127.0.0.1:{port} within 4 s: ranks 2, 4; \
         came: rank 0 (host host-0), rank 1 (host host-1), rank 3 (host host-3)"
    );
    for error in results {
        assert!(matches!(&error, RendezvousError::Missing(line) if *line == expected), "{error}");
    }
    assert!(start.elapsed() < Duration::from_secs(50));
}

#[test]
fn a_rank_that_left_before_the_start_is_awaited_again() {
    let port = free_ports(2);
    let (first, notices) = rendezvous(port, 0, 2, CALM);
    std::thread::scope(|scope| {
        let coordinator = scope.spawn(|| join(&first));
        let mut hasty = rendezvous(port, 1, 2, CALM).0;
        // Its first try finds nobody in time, or is refused the port; either way it comes again.
        hasty.wait = Duration::from_millis(1);
        let _ = join(&hasty);
        let place = join(&rendezvous(port, 1, 2, CALM).0).expect("a world");
        let coordinator = coordinator.join().expect("a rank").expect("a world");
        on_ranks(vec![coordinator, place], |place| works(&place));
    });
    assert!(lines(&notices).len() <= 1);
}

#[test]
fn a_coordinator_that_is_none_is_said_to_be() {
    let port = free_ports(2);
    let mut settings = rendezvous(port, 1, 2, CALM).0;
    settings.wait = Duration::from_secs(1);
    let line = join(&settings).err().expect("nobody").to_string();
    assert!(line.starts_with(&format!("no coordinator answers at 127.0.0.1:{port} after 1 s: ")), "{line}");

    settings.wait = Duration::from_secs(60);
    let server = TcpListener::bind(("127.0.0.1", port)).expect("a port");
    let other = PROTOCOL + 6;
    let newer =
        format!("it speaks version {other} of the protocol, this rank version {PROTOCOL}: start the same build everywhere");
    std::thread::scope(|scope| {
        for (answer, expected) in [
            (b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n".to_vec(), "it does not speak this program's protocol"),
            (hello(other), newer.as_str()),
        ] {
            let server = &server;
            let serving = scope.spawn(move || {
                let (mut stream, _) = server.accept().expect("a caller");
                stream.write_all(&answer).expect("an answer");
                stream.read(&mut [0; 1000]).expect("a hello")
            });
            let line = join(&settings).err().expect("no coordinator").to_string();
            assert_eq!(line, format!("what listens at 127.0.0.1:{port} is no coordinator: {expected}"));
            serving.join().expect("a server");
        }
    });
}

#[test]
fn settings_that_cannot_work_are_refused() {
    let refused = |coordinator: &str, world_size: usize, liveness: Liveness| {
        let mut settings = rendezvous(1, 0, world_size, liveness).0;
        settings.coordinator = coordinator.into();
        join(&settings).err().expect("refused").to_string()
    };
    for coordinator in ["node-0", "node-0:", "node-0:0", ":1", "node-0:65536", ""] {
        let line = refused(coordinator, 2, CALM);
        assert_eq!(line, format!("--coordinator {coordinator:?}: give HOST:PORT, for example node-0:29600"));
    }
    let line = refused("node-0:65500", 64, CALM);
    assert!(line.ends_with("rank r listens at port 65500 + r, which for 64 ranks passes 65535"), "{line}");
    let line = refused("node-0:1000", 2, Liveness { dead_after_seconds: 0.0, ..CALM });
    assert!(line.starts_with("dead_after_seconds is 0: "), "{line}");
}

#[test]
fn one_rank_alone_opens_no_port() {
    let mut settings = rendezvous(1, 0, 1, CALM).0;
    settings.coordinator = "no-such-host.invalid:1".into();
    let place = join(&settings).expect("a world");
    works(&place);
    assert_eq!(place.hosts(), ["host-0"]);
}
