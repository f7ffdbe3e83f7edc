//! One server over the whole run, in a thread of its own: it is started, asked for its health, given new weights, and started again.

use std::io::ErrorKind;
use std::net::TcpListener;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::http::Client;
use super::keeper::{Job, KILL, last_words};
use super::process::Process;
use super::protocol::{ProtocolError, Session};
use super::settings::{Settings, VISIBLE_DEVICES};
use super::{Board, Loaded, Notice, OnNotice, Place, ServerState, TICK, Weights};

/// The first wait before a restart; each later one is twice as long.
const FIRST_BACKOFF: Duration = Duration::from_secs(1);
const LONGEST_BACKOFF: Duration = Duration::from_secs(60);
/// A server that is still starting says so this often.
const STARTING_NOTICE: Duration = Duration::from_secs(30);
/// One question about a server's health has so long, and so long at least: what a late one is told shall not be that it came too late.
const PROBE: Duration = Duration::from_secs(10);
const SHORTEST_PROBE: Duration = Duration::from_secs(1);

/// What launchers tell the learner's own processes. Servers that found it would take themselves for ranks of the learner's job.
const LAUNCHERS_VARIABLES: [&str; 9] = [
    "RANK",
    "LOCAL_RANK",
    "GROUP_RANK",
    "NODE_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "LEARNER_TOKEN",
];

/// The place of one server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Plan {
    /// `host:port`.
    pub(super) address: String,
    port: u16,
    /// Numbers of its GPUs, as 0,1.
    gpus: String,
}

/// One server for every `tensor_parallel` GPUs of the node. `visible` is what limits this process to some of its GPUs.
///
/// # Errors
/// Keys and numbers that do not go together.
pub(super) fn plans(settings: &Settings, place: &Place, visible: &Option<String>) -> Result<Vec<Plan>, String> {
    settings.check().map_err(|errors| errors.within("rollout").to_string())?;
    settings.check_node(place.gpus)?;
    let gpus: Vec<String> = match visible {
        Some(visible) if !visible.is_empty() => visible.split(',').map(|gpu| gpu.trim().to_string()).collect(),
        _ => (0..place.gpus).map(|gpu| gpu.to_string()).collect(),
    };
    if gpus.len() < place.gpus {
        return Err(format!("{VISIBLE_DEVICES} lets this process see {} GPUs, but servers need {}", gpus.len(), place.gpus));
    }
    let groups = gpus[..place.gpus].chunks(settings.tensor_parallel);
    let host = if place.host.contains(':') { format!("[{}]", place.host) } else { place.host.clone() };
    let plan = |(port, gpus): (u16, &[String])| Plan { address: format!("{host}:{port}"), port, gpus: gpus.join(",") };
    Ok((settings.port..=u16::MAX).zip(groups).map(plan).collect())
}

impl Plan {
    /// Where what the server prints goes.
    fn log(&self, place: &Place) -> PathBuf {
        place.logs.join(format!("{}-{}.log", place.node, self.port))
    }

    pub(super) fn job(&self, settings: &Settings, place: &Place, weights: &Weights) -> Job {
        // `Weights::of` lets no other path through.
        let model = weights.directory.to_str().unwrap_or_default();
        Job {
            command: settings.command_for(model, &place.host, self.port, &self.gpus),
            environment: settings.environment_for(&self.gpus),
            without: LAUNCHERS_VARIABLES.map(str::to_string).to_vec(),
            log: self.log(place),
            log_bytes: settings.log_bytes,
            stop_seconds: settings.stop_seconds,
        }
    }
}

pub(super) struct Watcher {
    index: usize,
    plan: Plan,
    settings: Settings,
    place: Place,
    board: Arc<Board>,
    on_notice: OnNotice,
    log: PathBuf,
}

/// Why a server's process is no longer wanted.
enum End {
    /// The learner stops.
    Stop,
    Trouble(String),
}

impl Watcher {
    pub(super) fn new(
        index: usize,
        plan: Plan,
        settings: &Settings,
        place: &Place,
        board: &Arc<Board>,
        on_notice: &OnNotice,
    ) -> Watcher {
        let log = plan.log(place);
        let (settings, place) = (settings.clone(), place.clone());
        Watcher { index, plan, settings, place, board: Arc::clone(board), on_notice: Arc::clone(on_notice), log }
    }

    /// Until the learner stops or the server is given up.
    pub(super) fn watch(self) {
        let mut restarts = 0;
        let mut was_ready = false;
        loop {
            let End::Trouble(reason) = self.live(&mut was_ready) else { return };
            // What dies before it was ever ready would die again of the same.
            if !was_ready || restarts == self.settings.max_restarts {
                let after =
                    if restarts > 0 { format!(" (after {restarts} restarts, rollout.max_restarts)") } else { String::new() };
                let reason = reason + &after;
                self.notice(true, &format!("given up: {reason}"));
                self.board.set(self.index, ServerState::GivenUp(reason));
                return;
            }
            self.board.set(self.index, ServerState::NotReady);
            let backoff = FIRST_BACKOFF.saturating_mul(1 << restarts.min(16)).min(LONGEST_BACKOFF);
            restarts += 1;
            let most = self.settings.max_restarts;
            self.notice(true, &format!("{reason}; restart {restarts} of {most} in {} s", backoff.as_secs()));
            if self.wait_until(Instant::now() + backoff) {
                return;
            }
        }
    }

    /// One process of the server, from its start to its end. It is ended when this returns.
    fn live(&self, was_ready: &mut bool) -> End {
        self.one_life(was_ready).err().unwrap_or(End::Stop)
    }

    fn one_life(&self, was_ready: &mut bool) -> Result<(), End> {
        let started = Instant::now();
        let (mut weights, mut generation) = self.wanted();
        // A directory that has been removed since would make the server look for a model of that name elsewhere.
        weights = Weights::of(&weights.directory, weights.version.clone()).map_err(|error| End::Trouble(error.to_string()))?;
        self.wait_for_port()?;
        let job = self.plan.job(&self.settings, &self.place, &weights);
        let mut process = Process::start(&self.place.program, &job)
            .map_err(|error| End::Trouble(format!("{}: {error}", self.place.program.display())))?;
        self.notice(false, &format!("starting on GPUs {}, output in {}", self.plan.gpus, self.log.display()));
        self.wait_for_health(&mut process, started).map_err(|end| match end {
            End::Trouble(reason) => End::Trouble(format!("{reason}; the command was: {}", job.command.join(" "))),
            End::Stop => End::Stop,
        })?;
        let deadline = Instant::now() + Duration::from_secs_f64(self.settings.load_seconds);
        let verified = self
            .ask(&mut process, deadline, |session| session.adopt(&weights))?
            .map_err(|error| End::Trouble(format!("started, but {error}")))?;
        self.ready(generation, &weights, started, *was_ready, verified);
        *was_ready = true;
        let mut healthy = Instant::now();
        loop {
            let next_probe = healthy + Duration::from_secs_f64(self.settings.health_seconds);
            self.watch_process(&mut process, next_probe, generation)?;
            let (wanted, wanted_generation) = self.wanted();
            if wanted_generation != generation {
                (weights, generation) = (wanted, wanted_generation);
                self.load(&mut process, &weights, generation)?;
                healthy = Instant::now();
            } else if Instant::now() >= next_probe {
                healthy = self.probe(&mut process, healthy)?;
            }
        }
    }

    fn wanted(&self) -> (Weights, u64) {
        let state = self.board.lock();
        (state.weights.clone(), state.generation)
    }

    fn ready(&self, generation: u64, weights: &Weights, since: Instant, restarted: bool, verified: bool) {
        let seconds = since.elapsed().as_secs_f64();
        let loaded = Loaded { address: self.plan.address.clone(), seconds, bytes: weights.bytes, restarted, verified };
        let doubt = if verified { "" } else { " (its version cannot be asked)" };
        self.notice(false, &format!("ready with {} after {seconds:.1} s{doubt}", weights.version));
        self.board.set(self.index, ServerState::Ready { generation, loaded });
    }

    /// New weights in place.
    fn load(&self, process: &mut Process, weights: &Weights, generation: u64) -> Result<(), End> {
        let started = Instant::now();
        let deadline = started + Duration::from_secs_f64(self.settings.load_seconds);
        match self.ask(process, deadline, |session| session.load(weights))? {
            Ok(verified) => self.ready(generation, weights, started, false, verified),
            Err(error) => return Err(End::Trouble(format!("could not load {}: {error}", weights.version))),
        }
        Ok(())
    }

    /// Asks once; the time of the last healthy answer.
    fn probe(&self, process: &mut Process, healthy: Instant) -> Result<Instant, End> {
        let bound = healthy + Duration::from_secs_f64(self.settings.unhealthy_seconds);
        match self.ask(process, probe_deadline(bound), |session| session.health())? {
            Ok(()) => Ok(Instant::now()),
            Err(error) if Instant::now() >= bound => {
                let seconds = healthy.elapsed().as_secs_f64();
                Err(End::Trouble(format!("not healthy for {seconds:.1} s ({error})")))
            }
            Err(_) => {
                // A refusal comes at once: ask again, but not in a circle without rest.
                self.watch_process(process, (Instant::now() + TICK).min(bound), u64::MAX)?;
                Ok(healthy)
            }
        }
    }

    fn wait_for_port(&self) -> Result<(), End> {
        // What an earlier run has left may still be ending.
        let deadline = Instant::now() + Duration::from_secs_f64(self.settings.stop_seconds) + KILL;
        loop {
            match TcpListener::bind((self.place.host.as_str(), self.plan.port)) {
                Ok(_) => return Ok(()),
                Err(error) if error.kind() == ErrorKind::AddrInUse && Instant::now() < deadline => {}
                Err(error) if error.kind() == ErrorKind::AddrInUse => {
                    let port = self.plan.port;
                    return Err(End::Trouble(format!(
                        "port {port} is in use by another program; set rollout.port to a free one"
                    )));
                }
                Err(error) => return Err(End::Trouble(format!("cannot listen at {}: {error}", self.plan.address))),
            }
            if self.wait_until(Instant::now() + TICK) {
                return Err(End::Stop);
            }
        }
    }

    fn wait_for_health(&self, process: &mut Process, started: Instant) -> Result<(), End> {
        let launched = Instant::now();
        let deadline = launched + Duration::from_secs_f64(self.settings.start_seconds);
        let mut next_notice = launched + STARTING_NOTICE;
        loop {
            let answer = self.ask(process, probe_deadline(deadline), |session| session.health())?;
            let Err(error) = answer else { return Ok(()) };
            if Instant::now() >= deadline {
                let seconds = self.settings.start_seconds;
                let words = self.last_words(3);
                return Err(End::Trouble(format!("not healthy within {seconds} s (rollout.start_seconds): {error}{words}")));
            }
            if Instant::now() >= next_notice {
                next_notice += STARTING_NOTICE;
                let (seconds, words) = (started.elapsed().as_secs(), self.last_words(1));
                self.notice(false, &format!("starting for {seconds} s of at most {}{words}", self.settings.start_seconds));
            }
            self.watch_process(process, Instant::now() + 3 * TICK, u64::MAX)?;
        }
    }

    /// Waits until a moment, or until the weights wanted are no longer those of `generation` (`u64::MAX`: whatever is wanted).
    fn watch_process(&self, process: &mut Process, until: Instant, generation: u64) -> Result<(), End> {
        loop {
            if let Some(reason) = self.died(process) {
                return Err(End::Trouble(reason));
            }
            let state = self.board.lock();
            if state.stop {
                return Err(End::Stop);
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() || (generation != u64::MAX && state.generation != generation) {
                return Ok(());
            }
            drop(self.board.wait(state, left.min(TICK)));
        }
    }

    /// Speaks to the server until it has answered, has died, the time is up, or the learner stops.
    fn ask<T>(
        &self,
        process: &mut Process,
        deadline: Instant,
        question: impl Fn(&Session<'_>) -> Result<T, ProtocolError>,
    ) -> Result<Result<T, ProtocolError>, End> {
        let answer = {
            let process = std::cell::RefCell::new(&mut *process);
            let give_up = || self.board.stopped() || process.borrow_mut().ended().is_some();
            let client = Client { address: &self.plan.address, give_up: &give_up };
            question(&Session { kind: self.settings.server, client, deadline })
        };
        if answer.is_err() {
            if self.board.stopped() {
                return Err(End::Stop);
            }
            if let Some(reason) = self.died(process) {
                return Err(End::Trouble(reason));
            }
        }
        Ok(answer)
    }

    fn died(&self, process: &mut Process) -> Option<String> {
        let how = process.ended()?.to_string();
        Some(format!("died: {how}{}", self.last_words(3)))
    }

    /// The end of its output, behind a colon.
    fn last_words(&self, most_lines: usize) -> String {
        let words = last_words(&self.log, most_lines);
        if words.is_empty() { String::new() } else { format!(": {words}") }
    }

    /// Sleeps; whether the learner stops.
    fn wait_until(&self, until: Instant) -> bool {
        let mut state = self.board.lock();
        loop {
            let left = until.saturating_duration_since(Instant::now());
            if state.stop || left.is_zero() {
                return state.stop;
            }
            state = self.board.wait(state, left);
        }
    }

    fn notice(&self, trouble: bool, text: &str) {
        (self.on_notice)(&Notice { address: self.plan.address.clone(), text: text.to_string(), trouble });
    }
}

/// When a question about health is answered too late, if nothing good came until `bound`.
fn probe_deadline(bound: Instant) -> Instant {
    let now = Instant::now();
    bound.min(now + PROBE).max(now + SHORTEST_PROBE)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_server_has_gpus_and_a_port_of_its_own() {
        let settings = Settings { tensor_parallel: 2, port: 9000, ..Settings::default() };
        let place = |gpus, host: &str| Place {
            program: PathBuf::new(),
            host: host.to_string(),
            node: 3,
            gpus,
            logs: PathBuf::from("servers"),
        };
        let of = |plans: Vec<Plan>| plans.into_iter().map(|plan| (plan.address, plan.gpus)).collect::<Vec<_>>();
        let pairs = |pairs: &[(&str, &str)]| pairs.iter().map(|(a, b)| (a.to_string(), b.to_string())).collect::<Vec<_>>();
        let found = of(plans(&settings, &place(4, "node3"), &None).unwrap());
        assert_eq!(found, pairs(&[("node3:9000", "0,1"), ("node3:9001", "2,3")]));
        // Of what this process may see.
        let found = of(plans(&settings, &place(4, "::1"), &Some("7, 6,GPU-ab,0,1".into())).unwrap());
        assert_eq!(found, pairs(&[("[::1]:9000", "7,6"), ("[::1]:9001", "GPU-ab,0")]));
        assert!(plans(&settings, &place(4, "h"), &Some("0".into())).unwrap_err().contains("see 1 GPUs"));
        assert!(plans(&settings, &place(3, "h"), &None).unwrap_err().contains("rollout.tensor_parallel = 2"));
    }
}
