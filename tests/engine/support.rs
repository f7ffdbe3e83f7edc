//! A folder with two models and a fake server, and what the server and the learner say.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use learner::engine::servers::{Notice, Place, Servers, ServersError, Settings, Weights};
use serde_json::Value;

/// Generous: a machine under load may let a process wait for long.
pub const PATIENCE: Duration = Duration::from_secs(90);

pub struct Scene {
    pub folder: tempfile::TempDir,
    pub settings: Settings,
    pub gpus: usize,
    notices: Arc<Mutex<Vec<Notice>>>,
}

impl Scene {
    /// One server a GPU; `habits` are those of `fake_server.py`.
    pub fn new(gpus: usize, habits: &[&str]) -> Scene {
        let folder = tempfile::tempdir().expect("a folder");
        for model in ["start", "step-1", "step-2"] {
            let directory = folder.path().join(model);
            std::fs::create_dir(&directory).expect("a folder");
            std::fs::write(directory.join("config.json"), "{}").expect("a file");
            std::fs::write(directory.join("model.safetensors"), [0; 1000]).expect("a file");
        }
        let script = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/engine/fake_server.py");
        let mut command: Vec<String> = ["python3", script, "{model}", "{port}", "{gpus}"].map(str::to_string).to_vec();
        command.push(folder.path().to_string_lossy().into_owned());
        command.extend(habits.iter().map(|habit| habit.to_string()));
        let settings = Settings {
            command,
            port: free_ports(gpus as u16),
            start_seconds: PATIENCE.as_secs_f64(),
            health_seconds: 0.1,
            unhealthy_seconds: 30.0,
            stop_seconds: 5.0,
            max_restarts: 1,
            ..Settings::default()
        };
        Scene { folder, settings, gpus, notices: Arc::default() }
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    pub fn weights(&self, name: &str) -> Weights {
        Weights::of(&self.path(name), name).expect("weights")
    }

    pub fn place(&self) -> Place {
        Place {
            program: PathBuf::from(env!("CARGO_BIN_EXE_learner")),
            host: "127.0.0.1".to_string(),
            node: 0,
            gpus: self.gpus,
            logs: self.path("servers"),
        }
    }

    pub fn start(&self) -> Servers {
        let notices = Arc::clone(&self.notices);
        let on_notice = Arc::new(move |notice: &Notice| notices.lock().expect("notices").push(notice.clone()));
        Servers::start(&self.settings, &self.place(), self.weights("start"), on_notice).expect("servers on their way")
    }

    /// All that went wrong so far, as lines.
    pub fn troubles(&self) -> Vec<String> {
        let notices = self.notices.lock().expect("notices");
        notices.iter().filter(|notice| notice.trouble).map(|notice| notice.text.clone()).collect()
    }

    pub fn port(&self, server: u16) -> u16 {
        self.settings.port + server
    }

    /// What each start of a server found.
    pub fn starts(&self, server: u16) -> Vec<Value> {
        lines(&self.path(&format!("starts-{}", self.port(server))))
    }

    /// Paths and bodies of what a server was asked to do.
    pub fn requests(&self, server: u16) -> Vec<Value> {
        lines(&self.path(&format!("requests-{}", self.port(server))))
    }

    /// Makes the Nth start of a server do something.
    pub fn tell(&self, server: u16, start: usize, what: &str) {
        std::fs::write(self.path(&format!("{what}-{}-{start}", self.port(server))), "").expect("a file");
    }

    pub fn log(&self, server: u16) -> PathBuf {
        self.path("servers").join(format!("0-{}.log", self.port(server)))
    }

    pub fn pid(&self, server: u16, start: usize) -> u64 {
        self.starts(server)[start - 1]["pid"].as_u64().expect("a process")
    }
}

/// Waits without giving up before [`PATIENCE`] is over.
pub fn ready(servers: &Servers) -> Result<(), ServersError> {
    servers.ensure_started(&patience()).map(drop)
}

/// Says to give up after [`PATIENCE`].
pub fn patience() -> impl Fn() -> bool {
    let until = Instant::now() + PATIENCE;
    move || Instant::now() >= until
}

#[track_caller]
pub fn wait_until(what: &str, condition: impl Fn() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !condition() {
        assert!(Instant::now() < deadline, "waited too long for {what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Whether a process is there and has not ended.
pub fn lives(pid: u64) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit_once(") ").is_some_and(|(_, fields)| !fields.starts_with(['Z', 'X']))
}

pub fn signal(name: &str, pid: u64) {
    let sent = std::process::Command::new("kill").args([&format!("-{name}"), &pid.to_string()]).status();
    assert!(sent.expect("kill runs").success());
}

fn lines(path: &Path) -> Vec<Value> {
    let text = std::fs::read_to_string(path).unwrap_or_default();
    // The last line may still be written.
    let whole = text.rfind('\n').map_or("", |end| &text[..end]);
    whole.lines().map(|line| serde_json::from_str(line).expect("a line of JSON")).collect()
}

/// The first of so many consecutive ports that nobody listens at; tests of this process never get the same.
pub fn free_ports(count: u16) -> u16 {
    static NEXT: Mutex<u16> = Mutex::new(0);
    let mut next = NEXT.lock().expect("a port");
    if *next == 0 {
        *next = 21_000 + (std::process::id() % 1000) as u16 * 10;
    }
    loop {
        let first = *next;
        *next += count;
        let free = |port| std::net::TcpListener::bind(("127.0.0.1", port)).is_ok();
        if (first..first + count).all(free) {
            return first;
        }
    }
}
