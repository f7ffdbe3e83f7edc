//! The pool: runs spread over this machine and runners elsewhere.

use std::net::{SocketAddr, ToSocketAddrs};
use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::sync::{Arc, PoisonError, RwLock};
use std::thread::JoinHandle;
use std::time::Duration;

use super::remote::{self, Lost, Remote, RemoteSession};
use super::{Limits, Request, RunResult, RunVerdict, SandboxError, SessionRequest, Settings, TestRequest, TestRun, Tier, linux};
use crate::wire::Token;

/// How often names are resolved again: an autoscaler adds runners behind a name.
const RESOLVE: Duration = Duration::from_secs(5);
/// After so many runners were lost in one run, it is a fault of ours.
const MOST_LOSSES: usize = 5;

/// All places where runs may go.
pub struct Runners {
    local: Option<(Arc<linux::Engine>, AtomicUsize)>,
    remotes: Arc<RwLock<Vec<Arc<Remote>>>>,
    limits: Limits,
    python: FoundPython,
    tier: Tier,
    /// Absent without names to resolve; held for its end.
    _resolving: Option<Resolving>,
}

/// The thread that looks for new runners; it ends when dropped.
struct Resolving {
    /// Held for as long as it shall look.
    stop: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

/// The interpreter and its version, or why there is none.
type FoundPython = Result<(PathBuf, String), SandboxError>;

/// Where a run goes.
enum Chosen<'a> {
    Here(&'a Arc<linux::Engine>, &'a AtomicUsize),
    There(Arc<Remote>),
}

impl Runners {
    /// Starts the sandbox of this machine, if it takes part, and meets the runners of `settings.runners`.
    ///
    /// # Errors
    /// As [`super::Sandbox::start`]; and in one line for a name behind which no runner answers, or one that is weaker than
    /// `settings.minimum_tier` or whose Python is another.
    pub fn start(settings: &Settings) -> Result<Runners, SandboxError> {
        let refuse = |field: &str, found: String, remedy: &str| {
            Err(SandboxError::Settings { field: field.into(), found, remedy: remedy.into() })
        };
        if !settings.local && settings.runners.is_empty() {
            return refuse("local", "false, and runners is empty".into(), "name runners, or let this machine take part");
        }
        let local = settings.local.then(|| linux::Engine::start(settings)).transpose()?.map(Arc::new);
        let mut remotes = Vec::new();
        let mut resolving = None;
        if !settings.runners.is_empty() {
            let token = remote::token(settings.token_file.as_deref())?;
            for name in &settings.runners {
                let met = meet_all(name, &token, &[]);
                let (met, lost): (Vec<_>, Vec<_>) = met.map_err(|reason| unreachable_runner(name, reason))?;
                if met.is_empty() {
                    let reason = lost.first().map_or("the name stands for no address".to_string(), |Lost(line)| line.clone());
                    return Err(unreachable_runner(name, reason));
                }
                remotes.extend(met.into_iter().map(Arc::new));
            }
            if let Some(weak) = remotes.iter().find(|remote| !remote.welcome.tier.meets(settings.minimum_tier)) {
                let found = format!("runner {} offers tier {}", weak.address, weak.welcome.tier);
                return refuse("minimum_tier", found, "lower the minimum, or start the runner where namespaces are allowed");
            }
            resolving = Some((settings.runners.clone(), token));
        }
        let python = common_python(local.as_deref(), &remotes)?;
        let tiers = local.iter().map(|engine| engine.tier()).chain(remotes.iter().map(|remote| remote.welcome.tier));
        let tier = if tiers.clone().all(|tier| tier == Tier::A) { Tier::A } else { Tier::B };
        let remotes = Arc::new(RwLock::new(remotes));
        let resolving = match resolving {
            Some((names, token)) => {
                let like = Like { python: python.clone().ok(), minimum_tier: tier };
                Some(keep_resolving(names, token, like, Arc::clone(&remotes))?)
            }
            None => None,
        };
        let local = local.map(|engine| (engine, AtomicUsize::new(0)));
        Ok(Runners { local, remotes, limits: settings.limits.clone(), python, tier, _resolving: resolving })
    }

    /// The weakest of all.
    pub fn tier(&self) -> Tier {
        self.tier
    }

    pub fn parallel(&self) -> usize {
        let there: usize = self.remotes().iter().map(|remote| remote.welcome.parallel).sum();
        there + self.local.as_ref().map_or(0, |(engine, _)| engine.parallel())
    }

    pub fn guarantees(&self) -> Vec<(String, String)> {
        let mut rows = self.local.as_ref().map_or(Vec::new(), |(engine, _)| engine.guarantees());
        for remote in self.remotes().iter() {
            let welcome = &remote.welcome;
            let lost = if remote.is_lost() { ", lost" } else { "" };
            let what = format!("tier {}, {} runs at the same time{lost}", welcome.tier, welcome.parallel);
            rows.push((format!("runner {}", remote.address), what));
        }
        rows
    }

    pub fn python(&self) -> FoundPython {
        self.python.clone()
    }

    pub fn run(&self, request: &Request) -> RunResult {
        let there = |remote: &Remote| remote.run(&Request { limits: self.limits_of(&request.limits), ..request.clone() });
        let result = self.somewhere(|engine| engine.run(request), there);
        result.unwrap_or_else(|Lost(reason)| RunResult::empty(self.tier, RunVerdict::Infrastructure(reason)))
    }

    pub fn run_python_tests(&self, request: &TestRequest) -> TestRun {
        let there = |remote: &Remote| {
            remote.run_python_tests(&TestRequest { limits: self.limits_of(&request.limits), ..request.clone() })
        };
        let result = self.somewhere(|engine| engine.run_python_tests(request), there);
        result.unwrap_or_else(|Lost(reason)| TestRun {
            result: RunResult::empty(self.tier, RunVerdict::Infrastructure(reason)),
            outcomes: Default::default(),
            started_warm: false,
        })
    }

    pub fn session(&self, request: &SessionRequest) -> Result<PlacedSession, SandboxError> {
        let here = |engine: &Arc<linux::Engine>| linux::Engine::session(engine, request).map(PlacedSession::Here);
        let there = |remote: &Remote| {
            let request = SessionRequest { limits: self.limits_of(&request.limits), ..request.clone() };
            Ok(remote.session(&request)?.map(PlacedSession::There))
        };
        self.somewhere(here, there).unwrap_or_else(|Lost(reason)| Err(SandboxError::Broken(reason)))
    }

    /// Of a run that goes elsewhere: those of these settings, not of that machine's.
    fn limits_of(&self, limits: &Option<Limits>) -> Option<Limits> {
        Some(limits.clone().unwrap_or_else(|| self.limits.clone()))
    }

    /// Does something at the place with the most room. A runner that is lost meanwhile does not count: it is done elsewhere.
    fn somewhere<T>(
        &self,
        here: impl Fn(&Arc<linux::Engine>) -> T,
        there: impl Fn(&Remote) -> Result<T, Lost>,
    ) -> Result<T, Lost> {
        let mut last = Lost("every runner is lost; see that they run and can be reached".to_string());
        for _ in 0..MOST_LOSSES {
            match self.choose() {
                Some(Chosen::Here(engine, in_flight)) => {
                    in_flight.fetch_add(1, Ordering::Relaxed);
                    let result = here(engine);
                    in_flight.fetch_sub(1, Ordering::Relaxed);
                    return Ok(result);
                }
                Some(Chosen::There(remote)) => match there(&remote) {
                    Ok(result) => return Ok(result),
                    Err(lost) => last = lost,
                },
                None => return Err(last),
            }
        }
        Err(last)
    }

    fn choose(&self) -> Option<Chosen<'_>> {
        let remotes = self.remotes();
        let there = remotes.iter().filter_map(|remote| Some((remote.load()?, remote)));
        let there = there.min_by(|(one, _), (other, _)| one.total_cmp(other));
        match (&self.local, there) {
            (Some((engine, in_flight)), there) => {
                let own = in_flight.load(Ordering::Relaxed) as f64 / engine.parallel().max(1) as f64;
                Some(match there {
                    Some((load, remote)) if load < own => Chosen::There(Arc::clone(remote)),
                    _ => Chosen::Here(engine, in_flight),
                })
            }
            (None, Some((_, remote))) => Some(Chosen::There(Arc::clone(remote))),
            // All are taken to be lost: the first that is asked anyway may be back.
            (None, None) => remotes.first().map(|remote| Chosen::There(Arc::clone(remote))),
        }
    }

    fn remotes(&self) -> Vec<Arc<Remote>> {
        self.remotes.read().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

impl Drop for Resolving {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            // It ends by itself; a panic in it has been printed.
            let _ = thread.join();
        }
    }
}

/// A session, where it is.
pub enum PlacedSession {
    Here(linux::Session),
    There(RemoteSession),
}

/// What a runner that is found later must be like.
struct Like {
    python: Option<(PathBuf, String)>,
    minimum_tier: Tier,
}

impl Like {
    fn admits(&self, remote: &Remote) -> bool {
        let same = match (&self.python, &remote.welcome.python) {
            (Some((_, one)), Ok((_, other))) => one == other,
            (None, _) => true,
            _ => false,
        };
        same && remote.welcome.tier.meets(self.minimum_tier)
    }
}

/// Looks for new runners behind the names, for as long as the sender is held.
fn keep_resolving(
    names: Vec<String>,
    token: Token,
    like: Like,
    remotes: Arc<RwLock<Vec<Arc<Remote>>>>,
) -> Result<Resolving, SandboxError> {
    let (stop, stopped) = channel::<()>();
    let look = move || {
        while let Err(RecvTimeoutError::Timeout) = stopped.recv_timeout(RESOLVE) {
            for name in &names {
                let known: Vec<SocketAddr> = {
                    let remotes = remotes.read().unwrap_or_else(PoisonError::into_inner);
                    remotes.iter().map(|remote| remote.address).collect()
                };
                // A name that cannot be resolved at this moment may be at the next.
                let Ok((met, _)) = meet_all(name, &token, &known) else { continue };
                let fitting = met.into_iter().filter(|remote| like.admits(remote)).map(Arc::new);
                remotes.write().unwrap_or_else(PoisonError::into_inner).extend(fitting);
            }
        }
    };
    let thread = std::thread::Builder::new()
        .name("runners".into())
        .spawn(look)
        .map_err(|error| SandboxError::Broken(format!("no thread that looks for runners: {error}")))?;
    Ok(Resolving { stop: Some(stop), thread: Some(thread) })
}

/// Meets whoever is behind a name and not yet known.
fn meet_all(name: &str, token: &Token, known: &[SocketAddr]) -> Result<(Vec<Remote>, Vec<Lost>), String> {
    let addresses: Vec<SocketAddr> = name.to_socket_addrs().map_err(|error| error.to_string())?.collect();
    let (mut met, mut lost) = (Vec::new(), Vec::new());
    for address in addresses.into_iter().filter(|address| !known.contains(address)) {
        match Remote::meet(address, token) {
            Ok(remote) => met.push(remote),
            Err(reason) => lost.push(reason),
        }
    }
    Ok((met, lost))
}

fn unreachable_runner(name: &str, reason: String) -> SandboxError {
    SandboxError::Settings {
        field: "runners".into(),
        found: format!("{name}: {reason}"),
        remedy: "start `learner sandbox serve` there with the same token, and name it as HOST:PORT".into(),
    }
}

/// The one version of Python that all have: with several, a verdict could depend on where a run went.
fn common_python(local: Option<&linux::Engine>, remotes: &[Arc<Remote>]) -> Result<FoundPython, SandboxError> {
    let here = local.map(|engine| ("this machine".to_string(), engine.python()));
    let there = remotes.iter().map(|remote| {
        let python = remote.welcome.python.clone().map_err(SandboxError::Python);
        (format!("runner {}", remote.address), python)
    });
    let mut first: Option<(String, FoundPython)> = None;
    for (place, python) in here.into_iter().chain(there) {
        let Some((other_place, other)) = &first else {
            first = Some((place, python));
            continue;
        };
        let version = |python: &FoundPython| python.as_ref().map_or("none".into(), |(_, version)| version.clone());
        if version(&python) != version(other) {
            return Err(SandboxError::Settings {
                field: "runners".into(),
                found: format!("{place} has Python {}, {other_place} {}", version(&python), version(other)),
                remedy: "give all the same version: a verdict must not depend on where a test ran".into(),
            });
        }
    }
    Ok(first.map_or(Err(SandboxError::Python("no runner".into())), |(_, python)| python))
}
