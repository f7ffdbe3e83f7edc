//! The program: everything is in the library, see `src/lib.rs` for the map.

use std::process::ExitCode;

fn main() -> ExitCode {
    // A sandbox's helper is this program started again; it must do nothing else first.
    if let Some(code) = learner::sandbox::helper_if_asked() {
        return code;
    }
    // The same holds for the keeper of a server.
    if let Some(code) = learner::engine::servers::keeper_if_asked() {
        return code;
    }
    learner::cli::main()
}
