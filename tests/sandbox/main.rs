//! Programs in the sandbox: honest ones and hostile ones, in both tiers, as root and as an ordinary user.

#![cfg(target_os = "linux")]

mod alone;
mod catalogue;
mod collector;
mod command_line;
mod complete;
mod every_program;
mod host;
mod killed;
mod ours;
mod remote;
mod sessions;
mod soak;
mod tests_of_python;
mod users;

use learner::sandbox::{Limits, Request, RunResult, Sandbox, Settings, Tier, set_helper};

pub const TIERS: [Tier; 2] = [Tier::A, Tier::B];

/// A sandbox of exactly this tier. Where the machine refuses it, the reason is printed and the tier is left out.
pub fn sandbox(tier: Tier, warm_interpreter: bool) -> Option<Sandbox> {
    start(Settings { tier: Some(tier), parallel: 4, warm_interpreter, ..Settings::default() })
}

/// The same for commands, with so many at once.
pub fn sandbox_for(tier: Tier, parallel: usize) -> Option<Sandbox> {
    start(Settings { tier: Some(tier), parallel, ..Settings::default() })
}

fn start(settings: Settings) -> Option<Sandbox> {
    set_helper(users::helper());
    match Sandbox::start(&settings) {
        Ok(sandbox) => Some(sandbox),
        Err(error) => {
            println!("left out: {error}");
            None
        }
    }
}

/// Limits that a hostile program reaches soon and a slow machine does not.
pub fn tight() -> Limits {
    Limits {
        wall_seconds: 20.0,
        cpu_seconds: 10.0,
        memory_bytes: 256 << 20,
        processes: 32,
        file_bytes: 8 << 20,
        workspace_bytes: 16 << 20,
        output_bytes: 64 << 10,
    }
}

pub fn shell(sandbox: &Sandbox, script: &str, limits: Limits) -> RunResult {
    let argv = ["sh", "-c", script].map(str::to_string).to_vec();
    sandbox.run(&Request { argv, limits: Some(limits), ..Request::default() })
}

pub fn stdout(result: &RunResult) -> String {
    String::from_utf8_lossy(&result.stdout).into_owned()
}
