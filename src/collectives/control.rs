//! One connection from each rank to rank 0 over which signs of life and verdicts go.
//!
//! Each side sends a heartbeat with what it waits for. Rank 0 sees a rank whose connection closes or falls silent, and who waits
//! for whom; it alone judges and tells all, so that all name the same rank. A rank that loses rank 0 itself names rank 0. No clock
//! is ever compared with another host's.

use std::net::{Shutdown, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::greeting::read_frame;
use super::health::{Health, Liveness, Wait};
use super::{CollectiveError, Failure, Operation};
use crate::wire::write_frame;

/// What goes over a control connection once the world is whole.
#[derive(Debug, Serialize, Deserialize)]
enum Message {
    Heartbeat {
        waits: Option<ToldWait>,
    },
    Verdict(CollectiveError),
    /// The rank ends as it should.
    Goodbye,
}

/// A [`Wait`] without a clock.
#[derive(Debug, Serialize, Deserialize)]
struct ToldWait {
    on: usize,
    operation: Operation,
    milliseconds: u64,
}

/// A rank's control connections: of rank 0 to all others, of all others to rank 0.
pub(super) struct Control {
    shared: Arc<Shared>,
}

struct Shared {
    rank: usize,
    health: Arc<Health>,
    liveness: Liveness,
    peers: Vec<Peer>,
    /// Whether the peers have been told a verdict, or it came from them.
    told: Mutex<bool>,
    closing: AtomicBool,
}

struct Peer {
    rank: usize,
    stream: TcpStream,
    /// One message at a time.
    writing: Mutex<()>,
    heard: Mutex<Instant>,
    left: AtomicBool,
}

impl Control {
    /// Begins to watch. `connections` are by the other side's rank.
    pub(super) fn start(
        rank: usize,
        health: Arc<Health>,
        liveness: Liveness,
        connections: Vec<(usize, TcpStream)>,
    ) -> std::io::Result<Control> {
        let mut peers = Vec::with_capacity(connections.len());
        for (rank, stream) in connections {
            stream.set_read_timeout(None)?;
            stream.set_write_timeout(Some(liveness.heartbeat().max(Duration::from_millis(100))))?;
            let heard = Mutex::new(Instant::now());
            peers.push(Peer { rank, stream, writing: Mutex::new(()), heard, left: AtomicBool::new(false) });
        }
        let closing = AtomicBool::new(false);
        let shared = Arc::new(Shared { rank, health, liveness, peers, told: Mutex::new(false), closing });
        // From here on a failure to start a thread closes what has been started.
        let control = Control { shared };
        for index in 0..control.shared.peers.len() {
            let shared = control.shared.clone();
            std::thread::Builder::new().name("control".into()).spawn(move || shared.listen(&shared.peers[index]))?;
        }
        let shared = control.shared.clone();
        std::thread::Builder::new().name("heartbeat".into()).spawn(move || shared.beat())?;
        Ok(control)
    }

    /// Stops the world. Returns once rank 0 has it, with the verdict that holds for all: rank 0's first. If rank 0 does not answer
    /// in time, this rank's own.
    pub(super) fn stop(&self, error: CollectiveError) -> CollectiveError {
        let shared = &self.shared;
        if shared.is_hub() {
            return shared.stop(error);
        }
        for hub in shared.peers.iter().filter(|peer| !peer.left.load(Ordering::Relaxed)) {
            // If it cannot be told it is gone, and is not waited for.
            let told = hub.write(&Message::Verdict(error.clone()));
            if let Some(verdict) = told.ok().and_then(|()| shared.health.wait_for_verdict(shared.liveness.dead_after())) {
                return verdict;
            }
        }
        shared.stop(error)
    }
}

impl Drop for Control {
    fn drop(&mut self) {
        self.shared.closing.store(true, Ordering::Relaxed);
        for peer in &self.shared.peers {
            // What cannot be told to one who has gone need not be.
            let _ = peer.write(&Message::Goodbye);
            let _ = peer.stream.shutdown(Shutdown::Both);
        }
    }
}

impl Peer {
    fn write(&self, message: &Message) -> std::io::Result<()> {
        let _writing = self.writing.lock().unwrap_or_else(PoisonError::into_inner);
        write_frame(&self.stream, message)
    }

    fn silent_for(&self) -> Duration {
        self.heard.lock().unwrap_or_else(PoisonError::into_inner).elapsed()
    }
}

impl Shared {
    fn is_hub(&self) -> bool {
        self.rank == 0
    }

    /// Decides, having told the others first: this process may end as soon as it knows.
    fn stop(&self, error: CollectiveError) -> CollectiveError {
        let mut told = self.told.lock().unwrap_or_else(PoisonError::into_inner);
        if !*told {
            *told = true;
            for peer in self.peers.iter().filter(|peer| !peer.left.load(Ordering::Relaxed)) {
                // Who cannot be told will notice that this rank is silent.
                let _ = peer.write(&Message::Verdict(error.clone()));
            }
        }
        self.health.fail(error)
    }

    /// Hears one peer until its connection ends.
    fn listen(&self, peer: &Peer) {
        loop {
            let message = read_frame::<Message>(&peer.stream, None);
            if self.closing.load(Ordering::Relaxed) {
                return;
            }
            *peer.heard.lock().unwrap_or_else(PoisonError::into_inner) = Instant::now();
            match message {
                Ok(Message::Heartbeat { waits }) => {
                    let ranks = self.health.hosts().len();
                    let waits = waits.filter(|wait| wait.on < ranks).and_then(|wait| {
                        let since = Instant::now().checked_sub(Duration::from_millis(wait.milliseconds))?;
                        Some(Wait { on: wait.on, operation: wait.operation, since })
                    });
                    self.health.told_waiting(peer.rank, waits);
                }
                Ok(Message::Verdict(error)) if self.is_hub() => {
                    self.stop(error);
                }
                Ok(Message::Verdict(error)) => {
                    *self.told.lock().unwrap_or_else(PoisonError::into_inner) = true;
                    self.health.fail(error);
                }
                Ok(Message::Goodbye) => {
                    self.health.told_waiting(peer.rank, None);
                    peer.left.store(true, Ordering::Relaxed);
                    return;
                }
                Err(error) => {
                    let reason = match error.kind() {
                        std::io::ErrorKind::InvalidData => format!("its control connection carries no messages: {error}"),
                        std::io::ErrorKind::UnexpectedEof => "its process ended (its control connection closed)".to_string(),
                        _ => format!("its control connection broke: {error}"),
                    };
                    self.stop(self.health.error(peer.rank, Failure::Gone, reason));
                    return;
                }
            }
        }
    }

    /// Sends heartbeats and judges those that do not come.
    fn beat(&self) {
        let heartbeat = self.liveness.heartbeat();
        loop {
            let waits = self.health.longest_wait(self.rank).map(|wait| ToldWait {
                on: wait.on,
                operation: wait.operation,
                milliseconds: wait.since.elapsed().as_millis() as u64,
            });
            let message = Message::Heartbeat { waits };
            for peer in self.peers.iter().filter(|peer| !peer.left.load(Ordering::Relaxed)) {
                // The thread that hears this peer notices when its connection is broken.
                let _ = peer.write(&message);
            }
            let before = Instant::now();
            let verdict = self.health.wait_for_verdict(heartbeat);
            if verdict.is_some() || self.closing.load(Ordering::Relaxed) {
                return;
            }
            // If this process itself was held up, so were the threads that hear the others.
            if before.elapsed() > 2 * heartbeat {
                continue;
            }
            if let Some(error) = self.silent().or_else(|| self.stalled()) {
                self.stop(error);
                return;
            }
        }
    }

    fn silent(&self) -> Option<CollectiveError> {
        let dead_after = self.liveness.dead_after();
        let watched: Vec<&Peer> = self.peers.iter().filter(|peer| !peer.left.load(Ordering::Relaxed)).collect();
        let silent = watched.iter().max_by_key(|peer| peer.silent_for())?;
        let longest = silent.silent_for();
        if longest < dead_after {
            return None;
        }
        let seconds = longest.as_secs_f64();
        let nearly = dead_after.saturating_sub(2 * self.liveness.heartbeat());
        if watched.len() > 1 && watched.iter().all(|peer| peer.silent_for() > nearly) {
            let reason = format!("nothing has come from any other rank for {seconds:.1} s: this host is cut off");
            return Some(self.health.error(self.rank, Failure::Gone, reason));
        }
        let mut reason = format!("nothing has come from it for {seconds:.1} s");
        if !self.is_hub() {
            reason.push_str(&format!(" (or rank {} on host {} is cut off)", self.rank, self.health.hosts()[self.rank]));
        }
        Some(self.health.error(silent.rank, Failure::Gone, reason))
    }

    /// Judged by rank 0, which hears who waits for whom. What it knows is up to a heartbeat old: it waits two longer.
    fn stalled(&self) -> Option<CollectiveError> {
        let bound = self.liveness.stall() + 2 * self.liveness.heartbeat();
        if self.is_hub() { self.health.stalled(bound) } else { None }
    }
}
