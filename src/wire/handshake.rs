//! How a connection begins, and how messages are framed.
//!
//! ```text
//! both      magic, protocol version, 32 random bytes
//! caller    request, proof of the token over both random numbers and the request
//! listener  reply, proof of the token over both random numbers and the reply
//! ```
//!
//! Nothing is read of a request before its proof holds, and to a caller whose proof does not the listener proves nothing: a proof would
//! let it try tokens at home. What follows on the same connection is not proved again: the token keeps
//! strangers out of a job, it does not hide the job's traffic from who can read or change the network.

use std::fs::File;
use std::io::{self, ErrorKind, Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use serde::Serialize;
use serde::de::DeserializeOwned;

use super::token::{Proof, Token};

const MAGIC: usize = 8;
const NONCE: usize = 32;
const HELLO: usize = MAGIC + 4 + NONCE;

/// The most bytes of a request or a reply.
const LONGEST_REQUEST: usize = 4096;

/// What both sides must speak.
#[derive(Clone, Copy, Debug)]
pub struct Protocol {
    pub magic: [u8; MAGIC],
    /// Of everything that is said. Programs of different versions do not meet.
    pub version: u32,
    /// What one side is called in an error, such as "rank".
    pub side: &'static str,
}

/// Why a connection came to nothing.
#[derive(Debug, thiserror::Error)]
pub enum HandshakeError {
    /// Closed or silent.
    #[error("{0}")]
    Io(#[from] io::Error),
    #[error("it does not speak this program's protocol")]
    Foreign,
    #[error("it speaks version {theirs} of the protocol, this {side} version {own}: start the same build everywhere")]
    Version { theirs: u32, own: u32, side: &'static str },
    #[error("it has another token than this {0}")]
    Token(&'static str),
}

/// The caller's side of a connection, up to the listener's reply.
pub fn call<T: DeserializeOwned>(
    stream: &TcpStream,
    protocol: &Protocol,
    token: &Token,
    request: &impl Serialize,
    deadline: Instant,
) -> Result<T, HandshakeError> {
    let own = nonce()?;
    write_all(stream, &protocol.hello(&own), deadline)?;
    let theirs = protocol.read_hello(stream, deadline)?;
    write_proved(stream, token, b"request", [&own, &theirs], request, deadline)?;
    // A listener with another token refuses, but cannot prove its reply.
    read_proved(stream, protocol, token, b"reply", [&own, &theirs], deadline)
}

/// A caller that has proved the token and waits for a reply.
pub struct Caller<T> {
    pub stream: TcpStream,
    pub request: T,
    nonces: [[u8; NONCE]; 2],
}

/// The listener's side of a connection, up to the request.
pub fn answer<T: DeserializeOwned>(
    stream: TcpStream,
    protocol: &Protocol,
    token: &Token,
    deadline: Instant,
) -> Result<Caller<T>, HandshakeError> {
    let own = nonce()?;
    // Also a caller of another version shall learn ours.
    let theirs = match protocol.read_hello(&stream, deadline) {
        Err(error @ HandshakeError::Version { .. }) => {
            write_all(&stream, &protocol.hello(&own), deadline)?;
            return Err(error);
        }
        theirs => theirs?,
    };
    write_all(&stream, &protocol.hello(&own), deadline)?;
    match read_proved(&stream, protocol, token, b"request", [&theirs, &own], deadline) {
        Ok(request) => Ok(Caller { stream, request, nonces: [theirs, own] }),
        Err(error) => {
            if matches!(error, HandshakeError::Token(_)) {
                // A reply that no token proves tells it that its own is another.
                write_message(&stream, b"null", &Proof::default(), deadline)?;
            }
            Err(error)
        }
    }
}

impl<T> Caller<T> {
    pub fn reply(&self, token: &Token, reply: &impl Serialize) -> Result<(), HandshakeError> {
        let [theirs, own] = &self.nonces;
        let deadline = Instant::now() + Duration::from_secs(5);
        write_proved(&self.stream, token, b"reply", [theirs, own], reply, deadline)
    }
}

impl Protocol {
    fn hello(&self, nonce: &[u8; NONCE]) -> Vec<u8> {
        [&self.magic[..], &self.version.to_le_bytes(), nonce].concat()
    }

    fn read_hello(&self, stream: &TcpStream, deadline: Instant) -> Result<[u8; NONCE], HandshakeError> {
        let mut bytes = [0; HELLO];
        // The magic first: a stranger may send less than a hello and wait.
        read_exact(stream, &mut bytes[..MAGIC], deadline)?;
        if bytes[..MAGIC] != self.magic {
            return Err(HandshakeError::Foreign);
        }
        read_exact(stream, &mut bytes[MAGIC..], deadline)?;
        let (version, nonce) = bytes[MAGIC..].split_at(4);
        let version = version.iter().rev().fold(0, |version, &byte| version << 8 | u32::from(byte));
        if version != self.version {
            return Err(HandshakeError::Version { theirs: version, own: self.version, side: self.side });
        }
        let mut theirs = [0; NONCE];
        theirs.copy_from_slice(nonce);
        Ok(theirs)
    }
}

fn write_proved<T: Serialize>(
    stream: &TcpStream,
    token: &Token,
    what: &[u8],
    [caller, listener]: [&[u8; NONCE]; 2],
    message: &T,
    deadline: Instant,
) -> Result<(), HandshakeError> {
    let body = serde_json::to_vec(message).map_err(io::Error::from)?;
    let proof = token.prove(&[what, caller, listener, &body]);
    Ok(write_message(stream, &body, &proof, deadline)?)
}

fn write_message(stream: &TcpStream, body: &[u8], proof: &Proof, deadline: Instant) -> io::Result<()> {
    write_all(stream, &[&(body.len() as u32).to_le_bytes()[..], body, proof].concat(), deadline)
}

fn read_proved<T: DeserializeOwned>(
    stream: &TcpStream,
    protocol: &Protocol,
    token: &Token,
    what: &[u8],
    [caller, listener]: [&[u8; NONCE]; 2],
    deadline: Instant,
) -> Result<T, HandshakeError> {
    let body = read_body(stream, LONGEST_REQUEST, Some(deadline))?;
    let mut proof: Proof = [0; 32];
    read_exact(stream, &mut proof, deadline)?;
    if !token.accepts(&proof, &[what, caller, listener, &body]) {
        return Err(HandshakeError::Token(protocol.side));
    }
    serde_json::from_slice(&body).map_err(|_| HandshakeError::Foreign)
}

/// 32 bytes that nobody can foresee.
fn nonce() -> io::Result<[u8; NONCE]> {
    let mut nonce = [0; NONCE];
    File::open("/dev/urandom")?.read_exact(&mut nonce)?;
    Ok(nonce)
}

/// Sends one message. The stream's own write timeout holds.
///
/// # Errors
/// Also if it has more than 4 GiB.
pub fn write_frame<T: Serialize>(mut stream: &TcpStream, message: &T) -> io::Result<()> {
    let body = serde_json::to_vec(message)?;
    let length = u32::try_from(body.len()).map_err(|_| io::Error::new(ErrorKind::InvalidData, "a message of over 4 GiB"))?;
    stream.write_all(&[&length.to_le_bytes()[..], &body].concat())
}

/// Receives one message of at most `longest` bytes; without a deadline it waits for ever.
pub fn read_frame<T: DeserializeOwned>(stream: &TcpStream, longest: usize, deadline: Option<Instant>) -> io::Result<T> {
    Ok(serde_json::from_slice(&read_body(stream, longest, deadline)?)?)
}

fn read_body(mut stream: &TcpStream, longest: usize, deadline: Option<Instant>) -> io::Result<Vec<u8>> {
    let mut read = |bytes: &mut [u8]| match deadline {
        Some(deadline) => read_exact(stream, bytes, deadline),
        None => stream.read_exact(bytes),
    };
    let mut length = [0; 4];
    read(&mut length)?;
    let length = u32::from_le_bytes(length) as usize;
    if length > longest {
        return Err(io::Error::new(ErrorKind::InvalidData, format!("a message of {length} bytes, {longest} at most")));
    }
    let mut body = vec![0; length];
    read(&mut body)?;
    Ok(body)
}

/// The time until `deadline`, as a timeout of a socket, which must not be 0.
fn remaining(deadline: Instant) -> io::Result<Duration> {
    let remaining = deadline.saturating_duration_since(Instant::now());
    if remaining.is_zero() {
        return Err(io::Error::new(ErrorKind::TimedOut, "it said nothing in time"));
    }
    Ok(remaining.max(Duration::from_millis(1)))
}

fn is_timeout(error: &io::Error) -> bool {
    matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut | ErrorKind::Interrupted)
}

fn read_exact(mut stream: &TcpStream, bytes: &mut [u8], deadline: Instant) -> io::Result<()> {
    let mut done = 0;
    while done < bytes.len() {
        stream.set_read_timeout(Some(remaining(deadline)?))?;
        match stream.read(&mut bytes[done..]) {
            Ok(0) => return Err(io::Error::new(ErrorKind::UnexpectedEof, "it closed the connection")),
            Ok(count) => done += count,
            Err(error) if is_timeout(&error) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

fn write_all(mut stream: &TcpStream, bytes: &[u8], deadline: Instant) -> io::Result<()> {
    let mut done = 0;
    while done < bytes.len() {
        stream.set_write_timeout(Some(remaining(deadline)?))?;
        match stream.write(&bytes[done..]) {
            Ok(count) => done += count,
            Err(error) if is_timeout(&error) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::*;

    const PROTOCOL: Protocol = Protocol { magic: *b"TESTING\0", version: 7, side: "test" };

    #[test]
    fn a_wrong_token_is_told_without_a_proof_of_the_right_one() {
        let token = |text: &str| Token::new(text).expect("a token");
        let listener = TcpListener::bind(("127.0.0.1", 0)).expect("a port");
        let caller = TcpStream::connect(listener.local_addr().expect("an address")).expect("a connection");
        let (stream, _) = listener.accept().expect("a caller");
        let deadline = Instant::now() + Duration::from_secs(60);
        std::thread::scope(|scope| {
            let right = token("the token that is right");
            let answered = scope.spawn(move || answer::<String>(stream, &PROTOCOL, &right, deadline).err());
            let own = nonce().expect("a nonce");
            write_all(&caller, &PROTOCOL.hello(&own), deadline).expect("written");
            let theirs = PROTOCOL.read_hello(&caller, deadline).expect("a hello");
            let guessed = token("a token that is guessed");
            write_proved(&caller, &guessed, b"request", [&own, &theirs], &"let me in", deadline).expect("written");
            read_body(&caller, LONGEST_REQUEST, Some(deadline)).expect("a reply");
            let mut proof = [1; 32];
            read_exact(&caller, &mut proof, deadline).expect("a proof");
            assert_eq!(proof, [0; 32]);
            assert!(matches!(answered.join().expect("an answer"), Some(HandshakeError::Token("test"))));
        });
    }
}
