//! The port of one rank: lets those in who know the token, and says one line about all others.

use std::collections::BTreeMap;
use std::io::{self, ErrorKind};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError, mpsc};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::greeting::{self, Caller, Purpose, Reply};
use crate::wire::HandshakeError;
use crate::wire::Token;

/// How long a stranger may take to say who it is.
const HANDSHAKE: Duration = Duration::from_secs(5);
/// Connections at once that have not yet said who they are; the next ones are closed unheard.
const MOST_STRANGERS: usize = 256;
/// Lines about strangers; then one says that no more are printed.
const MOST_NOTICES: usize = 20;
/// How often the thread that accepts looks whether it should end.
const LOOK: Duration = Duration::from_millis(50);

/// Takes one line for the people who watch the job.
pub type Notice = Arc<dyn Fn(&str) + Send + Sync>;

/// An open port. Closed when dropped.
pub(super) struct Listener {
    shared: Arc<Shared>,
    accepting: Option<JoinHandle<()>>,
}

struct Shared {
    run_id: String,
    token: Token,
    notice: Notice,
    notices: AtomicUsize,
    strangers: AtomicUsize,
    closing: AtomicBool,
    /// Where callers go that want to join, or what they are told instead.
    joins: Mutex<Result<mpsc::Sender<Caller>, Reply>>,
    /// Connections of groups by name and calling rank, until the group takes them.
    links: Mutex<BTreeMap<(String, usize), TcpStream>>,
    linked: Condvar,
}

impl Listener {
    /// Opens `port` on the addresses through which a coordinator named `host` can be reached.
    pub(super) fn open(host: &str, port: u16) -> io::Result<TcpListener> {
        let host = host.trim_start_matches('[').trim_end_matches(']');
        let loopback = if host == "localhost" { Some(IpAddr::from([127, 0, 0, 1])) } else { host.parse().ok() };
        match loopback {
            Some(address) if address.is_loopback() => TcpListener::bind((address, port)),
            Some(IpAddr::V4(_)) => TcpListener::bind((Ipv4Addr::UNSPECIFIED, port)),
            _ => match TcpListener::bind((Ipv6Addr::UNSPECIFIED, port)) {
                Err(error) if error.kind() != ErrorKind::AddrInUse => TcpListener::bind((Ipv4Addr::UNSPECIFIED, port)),
                listener => listener,
            },
        }
    }

    /// `joins` is where those go that want to join, or why they cannot here.
    pub(super) fn start(
        listener: TcpListener,
        run_id: &str,
        token: &Token,
        joins: Result<mpsc::Sender<Caller>, String>,
        notice: Notice,
    ) -> io::Result<Listener> {
        listener.set_nonblocking(true)?;
        let shared = Arc::new(Shared {
            run_id: run_id.into(),
            token: token.clone(),
            notice,
            notices: AtomicUsize::new(0),
            strangers: AtomicUsize::new(0),
            closing: AtomicBool::new(false),
            joins: Mutex::new(joins.map_err(Reply::Refused)),
            links: Mutex::default(),
            linked: Condvar::new(),
        });
        let accepting = std::thread::Builder::new().name("accept".into()).spawn({
            let shared = shared.clone();
            move || shared.accept(&listener)
        })?;
        Ok(Listener { shared, accepting: Some(accepting) })
    }

    /// The world is whole: from now on nobody joins, for this reason.
    pub(super) fn refuse_joins(&self, reason: String) {
        *self.shared.joins.lock().unwrap_or_else(PoisonError::into_inner) = Err(Reply::Full(reason));
    }

    /// The connection that rank `from` has made for a group, waiting at most so long for it.
    pub(super) fn link(&self, group: &str, from: usize, at_most: Duration) -> Option<TcpStream> {
        let key = (group.to_owned(), from);
        let links = self.shared.links.lock().unwrap_or_else(PoisonError::into_inner);
        let waiting = self.shared.linked.wait_timeout_while(links, at_most, |links| !links.contains_key(&key));
        waiting.unwrap_or_else(PoisonError::into_inner).0.remove(&key)
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        self.shared.closing.store(true, Ordering::Relaxed);
        if let Some(accepting) = self.accepting.take() {
            // It ends by itself; a panic in it has been printed.
            let _ = accepting.join();
        }
    }
}

impl Shared {
    fn accept(self: &Arc<Shared>, listener: &TcpListener) {
        while !self.closing.load(Ordering::Relaxed) {
            match listener.accept() {
                Ok((stream, address)) => self.hear(stream, address),
                Err(error) if error.kind() == ErrorKind::WouldBlock => super::tcp::wait_readable(listener, LOOK),
                // One who has gone again, or no descriptor left: both pass with time, and until then somebody may still be there.
                Err(_) => std::thread::sleep(LOOK),
            }
        }
    }

    fn hear(self: &Arc<Shared>, stream: TcpStream, address: SocketAddr) {
        if self.strangers.fetch_add(1, Ordering::Relaxed) >= MOST_STRANGERS {
            self.strangers.fetch_sub(1, Ordering::Relaxed);
            return;
        }
        let shared = self.clone();
        let heard = std::thread::Builder::new().name("handshake".into()).spawn(move || {
            if let Some(line) = shared.greet(stream) {
                shared.say(&format!("{} was refused: {line}", SocketAddr::new(address.ip().to_canonical(), address.port())));
            }
            shared.strangers.fetch_sub(1, Ordering::Relaxed);
        });
        if heard.is_err() {
            self.strangers.fetch_sub(1, Ordering::Relaxed);
        }
    }

    /// Lets a caller in, or returns why not.
    fn greet(&self, stream: TcpStream) -> Option<String> {
        // Accepted sockets inherit the listener's mode on some systems.
        let prepared = stream.set_nonblocking(false).and_then(|()| stream.set_nodelay(true));
        if let Err(error) = prepared {
            return Some(error.to_string());
        }
        let caller = match greeting::answer(stream, &self.token, Instant::now() + HANDSHAKE) {
            Ok(caller) => caller,
            // Came and went: what probes of a cluster do all day.
            Err(HandshakeError::Io(error)) if error.kind() == ErrorKind::UnexpectedEof => return None,
            Err(error) => return Some(error.to_string()),
        };
        if caller.request.run_id != self.run_id {
            let reason = format!(
                "this port belongs to run {:?}, not to run {:?}: give each job a port of its own with --coordinator",
                self.run_id, caller.request.run_id
            );
            return self.refuse(&caller, Reply::Refused(reason));
        }
        match &caller.request.purpose {
            Purpose::Join { .. } => {
                let joins = self.joins.lock().unwrap_or_else(PoisonError::into_inner).clone();
                match joins {
                    Ok(joins) => match joins.send(caller) {
                        Ok(()) => None,
                        Err(mpsc::SendError(caller)) => self.refuse(&caller, Reply::Full("the coordinator has stopped".into())),
                    },
                    Err(reply) => self.refuse(&caller, reply),
                }
            }
            Purpose::Link { group } => {
                let key = (group.clone(), caller.request.rank);
                // The other rank may use the connection as soon as it has the reply.
                if let Err(error) = caller.reply(&self.token, &Reply::Accepted) {
                    return Some(error.to_string());
                }
                self.links.lock().unwrap_or_else(PoisonError::into_inner).insert(key, caller.stream);
                self.linked.notify_all();
                None
            }
        }
    }

    fn refuse(&self, caller: &Caller, reply: Reply) -> Option<String> {
        // If it has gone meanwhile, it needs no reply.
        let _ = caller.reply(&self.token, &reply);
        reply.reason().map(str::to_owned)
    }

    fn say(&self, line: &str) {
        let before = self.notices.fetch_add(1, Ordering::Relaxed);
        if before < MOST_NOTICES {
            (self.notice)(line);
        } else if before == MOST_NOTICES {
            (self.notice)("more connections were refused; they are no longer listed");
        }
    }
}
