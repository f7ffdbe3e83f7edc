//! One runner, seen from here.

use std::io;
use std::net::{SocketAddr, TcpStream};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::message::{Answer, Ask, Hello, Welcome};
use super::{LONGEST, PROTOCOL, SILENCE, place_of};
use crate::sandbox::{Change, Request, RunResult, RunVerdict, SandboxError, SessionRequest, TestRequest, TestRun, Tier};
use crate::wire::{self, Token};

/// A runner that does not answer is asked again after so long.
const PATIENCE: Duration = Duration::from_secs(5);

/// The runner is not there (any more), in one line. What it was asked can be asked of another.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Lost(pub String);

/// One runner.
pub struct Remote {
    pub address: SocketAddr,
    token: Token,
    pub welcome: Welcome,
    idle: Mutex<Vec<TcpStream>>,
    in_flight: AtomicUsize,
    /// Since when it has not been there.
    lost: Mutex<Option<Instant>>,
}

impl Remote {
    /// Meets the runner at an address.
    ///
    /// # Errors
    /// One line if nobody is there, or nobody with this token and of this version.
    pub fn meet(address: SocketAddr, token: &Token) -> Result<Remote, Lost> {
        let (stream, welcome) = connect(address, token)?;
        Ok(Remote {
            address,
            token: token.clone(),
            welcome,
            idle: Mutex::new(vec![stream]),
            in_flight: AtomicUsize::new(0),
            lost: Mutex::new(None),
        })
    }

    /// How full it is with runs from here: 1 when every place is taken. `None` for as long as it is taken to be lost.
    pub fn load(&self) -> Option<f64> {
        let lost = *self.lost.lock().unwrap_or_else(PoisonError::into_inner);
        if lost.is_some_and(|since| since.elapsed() < PATIENCE) {
            return None;
        }
        Some(self.in_flight.load(Ordering::Relaxed) as f64 / self.welcome.parallel.max(1) as f64)
    }

    pub fn is_lost(&self) -> bool {
        self.lost.lock().unwrap_or_else(PoisonError::into_inner).is_some()
    }

    pub fn run(&self, request: &Request) -> Result<RunResult, Lost> {
        let tree = place_of(request.tree.as_ref());
        match self.ask(&Ask::Run { request: request.clone(), tree })? {
            Answer::Ran(result) => Ok(result),
            Answer::Refused(reason) => Ok(self.refused(reason)),
            other => Err(self.lose(&format!("answered a run with {}", name(&other)))),
        }
    }

    pub fn run_python_tests(&self, request: &TestRequest) -> Result<TestRun, Lost> {
        let tree = place_of(request.tree.as_ref());
        match self.ask(&Ask::Tests { request: request.clone(), tree })? {
            Answer::Tested(run) => Ok(run),
            Answer::Refused(reason) => {
                Ok(TestRun { result: self.refused(reason), outcomes: Default::default(), started_warm: false })
            }
            other => Err(self.lose(&format!("answered tests with {}", name(&other)))),
        }
    }

    /// A session there. Its tree is there too: when the runner is lost, so is the session.
    pub fn session(&self, request: &SessionRequest) -> Result<Result<RemoteSession, SandboxError>, Lost> {
        let (stream, _) = connect(self.address, &self.token).inspect_err(|_| self.note_loss())?;
        let ask =
            Ask::Session { tree: place_of(request.tree.as_ref()), files: request.files.clone(), limits: request.limits.clone() };
        match exchange(&stream, &ask).map_err(|error| self.lose(&error.to_string()))? {
            Answer::Opened { tier } => Ok(Ok(RemoteSession { stream: Some(stream), address: self.address, tier })),
            Answer::Refused(reason) => Ok(Err(SandboxError::Broken(format!("runner {}: {reason}", self.address)))),
            other => Err(self.lose(&format!("answered a session with {}", name(&other)))),
        }
    }

    fn refused(&self, reason: String) -> RunResult {
        RunResult::empty(self.welcome.tier, RunVerdict::Infrastructure(format!("runner {}: {reason}", self.address)))
    }

    fn ask(&self, ask: &Ask) -> Result<Answer, Lost> {
        self.in_flight.fetch_add(1, Ordering::Relaxed);
        let answer = self.ask_on_some_connection(ask);
        self.in_flight.fetch_sub(1, Ordering::Relaxed);
        answer
    }

    fn ask_on_some_connection(&self, ask: &Ask) -> Result<Answer, Lost> {
        let idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner).pop();
        // An idle connection may have ended meanwhile, with a runner that has started again since: then a new one will do.
        if let Some(stream) = idle
            && let Ok(answer) = exchange(&stream, ask)
        {
            return Ok(self.keep(stream, answer));
        }
        let (stream, welcome) = connect(self.address, &self.token).inspect_err(|_| self.note_loss())?;
        if welcome.python != self.welcome.python || welcome.tier != self.welcome.tier {
            return Err(self.lose("is another runner than before: start the learner again to take it in"));
        }
        let answer = exchange(&stream, ask).map_err(|error| self.lose(&error.to_string()))?;
        Ok(self.keep(stream, answer))
    }

    fn keep(&self, stream: TcpStream, answer: Answer) -> Answer {
        *self.lost.lock().unwrap_or_else(PoisonError::into_inner) = None;
        self.idle.lock().unwrap_or_else(PoisonError::into_inner).push(stream);
        answer
    }

    fn lose(&self, reason: &str) -> Lost {
        self.note_loss();
        Lost(format!("runner {} {reason}", self.address))
    }

    fn note_loss(&self) {
        *self.lost.lock().unwrap_or_else(PoisonError::into_inner) = Some(Instant::now());
        self.idle.lock().unwrap_or_else(PoisonError::into_inner).clear();
    }
}

/// A session on a runner. Dropping it closes its connection, and the runner then removes its tree.
pub struct RemoteSession {
    /// Absent once the runner is lost.
    stream: Option<TcpStream>,
    address: SocketAddr,
    tier: Tier,
}

impl RemoteSession {
    pub fn tier(&self) -> Tier {
        self.tier
    }

    pub fn run(&mut self, request: &Request) -> RunResult {
        let tier = self.tier;
        let failed = |reason| RunResult::empty(tier, RunVerdict::Infrastructure(reason));
        match self.ask(&Ask::Command { request: request.clone() }) {
            Ok(Answer::Ran(result)) => result,
            Ok(Answer::Refused(reason)) => failed(format!("runner {}: {reason}", self.address)),
            Ok(other) => failed(format!("runner {} answered a command with {}", self.address, name(&other))),
            Err(reason) => failed(reason),
        }
    }

    pub fn read_changes(&mut self, max_bytes: u64) -> Result<Vec<Change>, String> {
        match self.ask(&Ask::ReadChanges { max_bytes })? {
            Answer::Changes(changes) => Ok(changes),
            Answer::Refused(reason) => Err(format!("runner {}: {reason}", self.address)),
            other => Err(format!("runner {} answered with {}", self.address, name(&other))),
        }
    }

    fn ask(&mut self, ask: &Ask) -> Result<Answer, String> {
        let Some(stream) = &self.stream else { return Err(format!("runner {} was lost, and the session with it", self.address)) };
        let answer = exchange(stream, ask);
        answer.map_err(|error| {
            self.stream = None;
            format!("runner {}: {error}; the session is lost with it", self.address)
        })
    }
}

/// A connection to a runner that has let us in.
fn connect(address: SocketAddr, token: &Token) -> Result<(TcpStream, Welcome), Lost> {
    let failed = |reason: String| Lost(format!("runner {address}: {reason}"));
    let stream = TcpStream::connect_timeout(&address, SILENCE).map_err(|error| failed(error.to_string()))?;
    let prepared = stream.set_nodelay(true).and_then(|()| stream.set_write_timeout(Some(SILENCE)));
    prepared.map_err(|error| failed(error.to_string()))?;
    let welcome = wire::call(&stream, &PROTOCOL, token, &Hello, Instant::now() + SILENCE);
    let welcome = welcome.map_err(|error| failed(error.to_string()))?;
    stream.set_write_timeout(Some(SILENCE)).map_err(|error| failed(error.to_string()))?;
    Ok((stream, welcome))
}

/// Asks, and waits for as long as the runner says that it is at it.
fn exchange(stream: &TcpStream, ask: &Ask) -> io::Result<Answer> {
    wire::write_frame(stream, ask)?;
    loop {
        match wire::read_frame(stream, LONGEST, Some(Instant::now() + SILENCE))? {
            Answer::Working => {}
            answer => return Ok(answer),
        }
    }
}

fn name(answer: &Answer) -> &'static str {
    match answer {
        Answer::Working => "a sign of life",
        Answer::Ran(_) => "a run",
        Answer::Tested(_) => "tests",
        Answer::Opened { .. } => "a session",
        Answer::Changes(_) => "changes",
        Answer::Refused(_) => "a refusal",
    }
}
