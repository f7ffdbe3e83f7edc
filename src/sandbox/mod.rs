//! Where programs run: isolation, limits, supervision, output.
//!
//! ```text
//! Sandbox::start   probe the tiers by running a command in each, refuse if the floor is not met
//! Sandbox::run     any command in a fresh tree              -> RunResult (verdict, usage, output)
//! run_python_tests named tests over code, warm or cold      -> TestRun   (outcome of every test seen to end)
//! Sandbox::session many commands over one tree              -> Session   (a result each, and what they changed)
//! Server           the same for other machines              -> `sandbox.runners` of their run files
//! ```
//!
//! Every run gets its own tree of files, its own limits and (tier A) its own namespaces; nothing of it survives it. Trouble
//! of ours is [`RunVerdict::Infrastructure`] and is decided by what our own set-up code reports, never by anything a
//! program prints or how it exits.

mod limits;
mod output;
mod remote;
mod request;
mod runners;
mod session;
mod snapshot;

#[cfg(target_os = "linux")]
mod linux;
#[cfg(not(target_os = "linux"))]
#[path = "elsewhere.rs"]
mod linux;

use std::fmt;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::{Arc, OnceLock};

use serde::{Deserialize, Serialize};

pub use limits::Limits;
#[cfg(target_os = "linux")]
pub use linux::kill_descendants;
pub use remote::{ServeSettings, Server, TOKEN_VARIABLE, token};
pub use request::{Accounting, LimitsHit, Mechanisms, Request, RunResult, RunVerdict, TestRequest, TestRun, TreeSource};
use runners::Runners;
pub use session::{Change, Now, Session, SessionRequest};
pub use snapshot::Snapshot;

use crate::algorithm::SettingErrors;

/// How strongly a run is kept from the machine and from other runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Tier {
    /// User, mount, PID, IPC, UTS and network namespaces with an own read-only root, seccomp and resource limits.
    #[serde(rename = "A", alias = "a")]
    A,
    /// For places where namespaces are refused: Landlock, seccomp, resource limits, and an own user id when run by root.
    #[serde(rename = "B", alias = "b")]
    B,
}

impl Tier {
    /// Whether this tier is at least as strong as `minimum`.
    pub fn meets(self, minimum: Tier) -> bool {
        self == Tier::A || minimum == Tier::B
    }
}

impl fmt::Display for Tier {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(match self {
            Tier::A => "A",
            Tier::B => "B",
        })
    }
}

/// The `[sandbox]` section of a run file.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Settings {
    /// The weakest tier that will do; a weaker machine is refused.
    pub minimum_tier: Tier,
    /// Use exactly this tier; absent: the strongest that works.
    pub tier: Option<Tier>,
    pub limits: Limits,
    /// Runs at the same time; 0 means three for two cores, since a run also waits. Waiting for a place counts against no limit.
    pub parallel: usize,
    /// The memory limits of all runs at the same time together; 0 means three quarters of what is available at the start. A
    /// run that does not fit beside the others waits.
    pub memory_bytes: u64,
    /// Where the kernel refuses an overlay of a tree, give each run a copy. Otherwise a run with a tree is refused there.
    pub copy_trees: bool,
    /// Fork Python tests off one started interpreter instead of starting one for each run.
    pub warm_interpreter: bool,
    /// The Python to run tests with; absent: the first on PATH that is at least 3.9 and runs in the sandbox.
    pub python: Option<PathBuf>,
    /// Other machines that take part, as HOST:PORT of a `learner sandbox serve`. Every address of a name is one, and a name is looked
    /// up again while the run goes on.
    pub runners: Vec<String>,
    /// Whether this machine takes part too.
    pub local: bool,
    /// The file of the secret that runners share with their clients; absent: it is in LEARNER_SANDBOX_TOKEN.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub token_file: Option<PathBuf>,
}

impl Default for Settings {
    fn default() -> Settings {
        Settings {
            minimum_tier: Tier::B,
            tier: None,
            limits: Limits::default(),
            parallel: 0,
            memory_bytes: 0,
            copy_trees: false,
            warm_interpreter: true,
            python: None,
            runners: Vec::new(),
            local: true,
            token_file: None,
        }
    }
}

/// Why a sandbox cannot be had. Each is one line that names the mechanism and the remedy.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SandboxError {
    /// The tier that was asked for does not work here, with what each tier tried ran into.
    #[error("sandbox: {wanted} is not available on this machine ({reasons}); {remedy}")]
    Unavailable { wanted: String, reasons: String, remedy: String },
    #[error("sandbox: no usable python3 ({0}); install Python 3.9 or later, or name one with sandbox.python")]
    Python(String),
    #[error("sandbox: {} cannot be a tree for runs: {found}; give a directory that can be read", path.display())]
    Tree { path: PathBuf, found: String },
    /// Limits that no program could run under.
    #[error("{}", one_line(.0))]
    Limits(#[from] SettingErrors),
    #[error("sandbox.{field}: {found}; {remedy}")]
    Settings { field: String, found: String, remedy: String },
    #[error("sandbox: programs can be contained on Linux only; run this on Linux (a container or a virtual machine will do)")]
    Unsupported,
    /// Something of ours broke.
    #[error("sandbox: {0}")]
    Broken(String),
}

fn one_line(SettingErrors(errors): &SettingErrors) -> String {
    errors.iter().map(|error| format!("sandbox.limits.{error}")).collect::<Vec<_>>().join("; ")
}

/// A place to run programs in. Cheap to clone; runs may be started from any number of threads.
#[derive(Clone)]
pub struct Sandbox {
    runners: Arc<Runners>,
}

impl Sandbox {
    /// Finds the strongest tier that works by running a command through it.
    ///
    /// # Errors
    /// [`SandboxError::Unavailable`] when no tier at or above `settings.minimum_tier` (or not the one of `settings.tier`)
    /// works, naming the mechanism that was refused; [`SandboxError::Limits`] for a limit of zero.
    pub fn start(settings: &Settings) -> Result<Sandbox, SandboxError> {
        settings.limits.check()?;
        Ok(Sandbox { runners: Arc::new(Runners::start(settings)?) })
    }

    pub fn tier(&self) -> Tier {
        self.runners.tier()
    }

    /// Runs at the same time.
    pub fn parallel(&self) -> usize {
        self.runners.parallel()
    }

    /// What is held by which mechanism, for the header of a run and for `doctor`: `("network", "own network namespace")`.
    pub fn guarantees(&self) -> Vec<(String, String)> {
        self.runners.guarantees()
    }

    /// The interpreter that runs Python tests, and its version.
    ///
    /// # Errors
    /// [`SandboxError::Python`] when none was found that runs in the sandbox.
    pub fn python(&self) -> Result<(PathBuf, String), SandboxError> {
        self.runners.python()
    }

    /// Runs a command in a fresh tree that holds `request.files` and is its working directory.
    pub fn run(&self, request: &Request) -> RunResult {
        self.runners.run(request)
    }

    /// Starts a session: a tree over which many commands will run.
    ///
    /// # Errors
    /// [`SandboxError::Broken`] when the tree cannot be set up, [`SandboxError::Limits`] for a limit of zero.
    pub fn session(&self, request: &SessionRequest) -> Result<Session, SandboxError> {
        self.runners.session(request).map(Session::new)
    }

    /// Runs named tests, in order, in a fresh tree. A test counts as passed only if the runner saw it return.
    pub fn run_python_tests(&self, request: &TestRequest) -> TestRun {
        self.runners.run_python_tests(request)
    }
}

/// The hidden first argument with which this program starts itself as a sandbox's helper.
pub const HELPER_ARGUMENT: &str = "sandbox-helper";

static HELPER: OnceLock<PathBuf> = OnceLock::new();

/// Names the program that understands [`HELPER_ARGUMENT`]; needed once, before [`Sandbox::start`], by programs other than
/// `learner` itself (tests, examples). The first call wins.
pub fn set_helper(path: impl Into<PathBuf>) {
    // A second call with another path is ignored: sandboxes may already be running with the first.
    let _ = HELPER.set(path.into());
}

/// To be called first thing in `main`: acts as a sandbox's helper if this process was started as one.
pub fn helper_if_asked() -> Option<ExitCode> {
    let mut arguments = std::env::args_os().skip(1);
    (arguments.next()? == HELPER_ARGUMENT).then(linux::helper_main)
}
