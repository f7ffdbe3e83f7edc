//! Worlds to test in: threads, and ranks over TCP on loopback.

use std::net::TcpListener;
use std::sync::atomic::{AtomicU16, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use learner::collectives::{Liveness, LocalCollectives, Rendezvous, RendezvousError, TcpCollectives, join, local_world};
use learner::wire::Token;

/// Longer than anything here takes on a loaded machine.
pub const PATIENCE: Duration = Duration::from_secs(90);

/// Times for tests that expect no failure.
pub const CALM: Liveness = Liveness { heartbeat_seconds: 1.0, dead_after_seconds: 60.0, stall_seconds: 90.0 };

/// A port so that this many from it on are free, below those that the system hands out by itself. Test processes start at
/// different places.
pub fn free_ports(count: u16) -> u16 {
    static NEXT: AtomicU16 = AtomicU16::new(0);
    let own = (std::process::id() % 37) as u16 * 300;
    for _ in 0..1000 {
        let first = 20_000 + (own + NEXT.fetch_add(count, Ordering::Relaxed)) % 11_000;
        if (first..first + count).all(|port| TcpListener::bind(("127.0.0.1", port)).is_ok()) {
            return first;
        }
    }
    panic!("no {count} free ports in a row");
}

/// The lines that a rank was given about strangers.
pub type Notices = Arc<Mutex<Vec<String>>>;

pub fn rendezvous(port: u16, rank: usize, world_size: usize, liveness: Liveness) -> (Rendezvous, Notices) {
    let notices = Notices::default();
    let notice = {
        let notices = notices.clone();
        Arc::new(move |line: &str| notices.lock().expect("a list").push(line.to_owned()))
    };
    let rendezvous = Rendezvous {
        coordinator: format!("127.0.0.1:{port}"),
        rank,
        world_size,
        run_id: "test".into(),
        token: Token::new("the token of the tests").expect("a token"),
        host: format!("host-{rank}"),
        wait: PATIENCE,
        liveness,
        notice,
        given_up: Arc::default(),
    };
    (rendezvous, notices)
}

/// Runs `work` on every rank at once; results by rank.
pub fn on_ranks<C: Send, A: Send>(places: Vec<C>, work: impl Fn(C) -> A + Sync) -> Vec<A> {
    let work = &work;
    std::thread::scope(|scope| {
        let threads: Vec<_> = places.into_iter().map(|place| scope.spawn(move || work(place))).collect();
        threads.into_iter().map(|thread| thread.join().expect("a rank")).collect()
    })
}

pub fn local(ranks: usize) -> Vec<LocalCollectives> {
    local_world(ranks, CALM.stall_seconds)
}

/// Worlds of ranks over TCP; ports that another program takes in between are left for others.
pub fn tcp(ranks: usize, liveness: Liveness) -> Vec<TcpCollectives> {
    for _ in 0..5 {
        let port = free_ports(ranks as u16);
        let settings = (0..ranks).map(|rank| rendezvous(port, rank, ranks, liveness).0).collect();
        let joined = on_ranks(settings, |settings: Rendezvous| join(&settings));
        match joined.into_iter().collect::<Result<Vec<_>, _>>() {
            Err(RendezvousError::Port { .. }) => {}
            joined => return joined.expect("a world"),
        }
    }
    panic!("ports are taken again and again");
}

/// Runs the same work in a world of threads and in one of TCP connections; results by rank, twice.
macro_rules! in_both {
    ($ranks:expr, |$rank:ident| $work:expr) => {
        [
            ("local", crate::support::on_ranks(crate::support::local($ranks), |$rank| $work)),
            ("tcp", crate::support::on_ranks(crate::support::tcp($ranks, crate::support::CALM), |$rank| $work)),
        ]
    };
}
pub(crate) use in_both;

/// Waits until `holds`, and fails with `what` if it does not in time.
pub fn wait_until(what: &str, mut holds: impl FnMut() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !holds() {
        assert!(Instant::now() < deadline, "{what} did not happen");
        std::thread::sleep(Duration::from_millis(10));
    }
}
