//! A runner, seen from there: a port, and a sandbox behind it.

use std::io;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use super::message::{Answer, Ask, Hello, Welcome};
use super::{LONGEST, PROTOCOL, SIGN_OF_LIFE, SILENCE};
use crate::sandbox::{Sandbox, SandboxError, Session, SessionRequest, Settings, Snapshot};
use crate::wire::{self, HandshakeError, Token};

/// How long a stranger may take to say who it is.
const HANDSHAKE: Duration = Duration::from_secs(5);
/// Connections at once; more are closed unheard.
const MOST_CONNECTIONS: usize = 2048;
/// How often the port is looked at while nobody comes.
const LOOK: Duration = Duration::from_millis(20);

/// What a runner offers, and to whom.
#[derive(Clone, Debug)]
pub struct ServeSettings {
    pub sandbox: Settings,
    pub token: Token,
    /// Directories below which a client may name a tree for its runs. None: no trees.
    pub trees: Vec<PathBuf>,
}

/// An open port with a sandbox behind it.
pub struct Server {
    listener: TcpListener,
    sandbox: Sandbox,
    settings: ServeSettings,
}

impl Server {
    /// Opens the port, then starts the sandbox.
    ///
    /// # Errors
    /// One line: the port is taken, a directory of trees is not there, or there is no such sandbox on this machine.
    pub fn open(address: SocketAddr, settings: &ServeSettings) -> Result<Server, SandboxError> {
        let listener =
            TcpListener::bind(address).and_then(|listener| listener.set_nonblocking(true).map(|()| listener)).map_err(
                |error| SandboxError::Broken(format!("cannot listen on {address}: {error}; choose another with --listen")),
            )?;
        let mut settings = settings.clone();
        for tree in &mut settings.trees {
            *tree = Snapshot::of_directory(&*tree)?.path().to_path_buf();
        }
        let sandbox = Sandbox::start(&settings.sandbox)?;
        Ok(Server { listener, sandbox, settings })
    }

    pub fn address(&self) -> io::Result<SocketAddr> {
        self.listener.local_addr()
    }

    pub fn sandbox(&self) -> &Sandbox {
        &self.sandbox
    }

    /// Serves until `stop`; then takes no more work and returns once the last connection has closed or its run has ended. `notice`
    /// takes a line about each stranger and each client.
    pub fn serve(&self, stop: &(dyn Fn() -> bool + Sync), notice: &(dyn Fn(&str) + Sync)) {
        let open = AtomicUsize::new(0);
        std::thread::scope(|scope| {
            while !stop() {
                match self.listener.accept() {
                    Ok((stream, address)) if open.load(Ordering::Relaxed) < MOST_CONNECTIONS => {
                        open.fetch_add(1, Ordering::Relaxed);
                        let heard = std::thread::Builder::new().name("runner".into()).spawn_scoped(scope, {
                            let open = &open;
                            move || {
                                if let Err(line) = self.attend(stream, stop) {
                                    notice(&format!("{address}: {line}"));
                                }
                                open.fetch_sub(1, Ordering::Relaxed);
                            }
                        });
                        if let Err(error) = heard {
                            open.fetch_sub(1, Ordering::Relaxed);
                            notice(&format!("{address}: no thread for it: {error}"));
                        }
                    }
                    // Nobody came, or one that has gone again, or no descriptor is left: each passes with time.
                    Ok(_) | Err(_) => std::thread::sleep(LOOK),
                }
            }
        });
    }

    /// One client's connection, to its end.
    fn attend(&self, stream: TcpStream, stop: &(dyn Fn() -> bool + Sync)) -> Result<(), String> {
        let say = |error: io::Error| error.to_string();
        stream.set_nonblocking(false).and_then(|()| stream.set_nodelay(true)).map_err(say)?;
        let caller = match wire::answer::<Hello>(stream, &PROTOCOL, &self.settings.token, Instant::now() + HANDSHAKE) {
            Ok(caller) => caller,
            // Came and went: what probes of a cluster do all day.
            Err(HandshakeError::Io(error)) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(()),
            Err(error) => return Err(format!("was refused: {error}")),
        };
        let python = self.sandbox.python().map_err(|error| error.to_string());
        let welcome = Welcome {
            tier: self.sandbox.tier(),
            parallel: self.sandbox.parallel(),
            guarantees: self.sandbox.guarantees(),
            python,
        };
        caller.reply(&self.settings.token, &welcome).map_err(|error| error.to_string())?;
        let stream = caller.stream;
        stream.set_write_timeout(Some(SILENCE)).map_err(say)?;
        let mut session = None;
        while let Some(ask) = next(&stream, stop)? {
            let answer = self.at_it(&stream, &mut session, ask)?;
            wire::write_frame(&stream, &answer).map_err(say)?;
        }
        Ok(())
    }

    /// Does what is asked, and meanwhile says to the client that it goes on. A run whose client has gone goes on to its own end, which
    /// its limits bound.
    fn at_it(&self, stream: &TcpStream, session: &mut Option<Session>, ask: Ask) -> Result<Answer, String> {
        let (done, waiting) = channel();
        std::thread::scope(|scope| {
            scope.spawn(move || {
                // Nobody waits any more when the client has gone.
                let _ = done.send(self.answer(session, ask));
            });
            loop {
                match waiting.recv_timeout(SIGN_OF_LIFE) {
                    Ok(answer) => return Ok(answer),
                    Err(RecvTimeoutError::Timeout) => {
                        wire::write_frame(stream, &Answer::Working).map_err(|error| format!("the client has gone: {error}"))?;
                    }
                    Err(RecvTimeoutError::Disconnected) => return Err("a fault of ours ended the run".to_string()),
                }
            }
        })
    }

    fn answer(&self, session: &mut Option<Session>, ask: Ask) -> Answer {
        let result = match ask {
            Ask::Run { mut request, tree } => self.tree(tree).map(|tree| {
                request.tree = tree;
                Answer::Ran(self.sandbox.run(&request))
            }),
            Ask::Tests { mut request, tree } => self.tree(tree).map(|tree| {
                request.tree = tree;
                Answer::Tested(self.sandbox.run_python_tests(&request))
            }),
            Ask::Session { tree, files, limits } => self.tree(tree).and_then(|tree| {
                let request = SessionRequest { tree, files, limits };
                let opened = self.sandbox.session(&request).map_err(|error| error.to_string())?;
                let tier = opened.tier();
                *session = Some(opened);
                Ok(Answer::Opened { tier })
            }),
            Ask::Command { request } => of_session(session).map(|session| Answer::Ran(session.run(&request))),
            Ask::ReadChanges { max_bytes } => {
                of_session(session).and_then(|session| session.read_changes(max_bytes)).map(Answer::Changes)
            }
        };
        result.unwrap_or_else(Answer::Refused)
    }

    /// The tree at a place that a client names, if it lies where trees may lie.
    fn tree(&self, place: Option<PathBuf>) -> Result<Option<Snapshot>, String> {
        let Some(place) = place else { return Ok(None) };
        let tree = Snapshot::of_directory(&place).map_err(|error| format!("{error} on the runner, at the same place as here"))?;
        // Resolved: a link does not lead out.
        let inside = |root: &PathBuf| tree.path().starts_with(root as &Path);
        if !self.settings.trees.iter().any(inside) {
            return Err(format!("{} does not lie in a directory of the runner's --trees", place.display()));
        }
        Ok(Some(tree))
    }
}

fn of_session(session: &mut Option<Session>) -> Result<&mut Session, String> {
    session.as_mut().ok_or_else(|| "no session was opened on this connection".to_string())
}

/// The next thing a client asks; `None` once it has closed, or the runner is to stop.
fn next(stream: &TcpStream, stop: &(dyn Fn() -> bool + Sync)) -> Result<Option<Ask>, String> {
    let mut byte = [0];
    loop {
        if stop() {
            return Ok(None);
        }
        stream.set_read_timeout(Some(Duration::from_millis(200))).map_err(|error| error.to_string())?;
        match stream.peek(&mut byte) {
            Ok(0) => return Ok(None),
            Ok(_) => break,
            Err(error)
                if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut | io::ErrorKind::Interrupted) => {}
            Err(_) => return Ok(None),
        }
    }
    let ask = wire::read_frame(stream, LONGEST, Some(Instant::now() + SILENCE))
        .map_err(|error| format!("it asked nothing: {error}"))?;
    Ok(Some(ask))
}
