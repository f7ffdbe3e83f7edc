//! A client for the few small requests that steer a server: HTTP/1.1 without TLS, one connection a request, JSON bodies.
//!
//! A crate for it would cost a tenth of the build's time, and the connections stay inside a cluster's own network. Everything that comes
//! back is bounded in time and size, and a request gives up as soon as its caller says so.

use std::io::{ErrorKind, Read, Write};
use std::net::{TcpStream, ToSocketAddrs};
use std::time::{Duration, Instant};

use serde_json::Value;

use super::TICK;

/// Status line and headers, or the line before a chunk, at most.
const MOST_HEAD: usize = 64 << 10;
/// A body, at most.
const MOST_BODY: usize = 4 << 20;

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum HttpError {
    #[error("cannot be reached: {0}")]
    Unreachable(String),
    #[error("no answer within {0:.1?}")]
    TimedOut(Duration),
    #[error("ended the connection in the middle of an answer")]
    Cut,
    #[error("answered with what is not HTTP: {0}")]
    NotHttp(String),
    #[error("answered with more than {0} bytes")]
    TooLong(usize),
    /// The caller gave up.
    #[error("given up")]
    GivenUp,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Answer {
    pub status: u16,
    pub body: Vec<u8>,
}

impl Answer {
    pub fn ok(&self) -> bool {
        (200..300).contains(&self.status)
    }

    /// The body as JSON; `null` if it is none.
    pub fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap_or(Value::Null)
    }

    /// The beginning of the body in one line, for messages.
    pub fn excerpt(&self) -> String {
        excerpt(&self.body)
    }
}

/// The beginning of what was received, as one printable line.
fn excerpt(bytes: &[u8]) -> String {
    let text = String::from_utf8_lossy(&bytes[..bytes.len().min(200)]);
    let words: Vec<&str> = text.split(|character: char| character.is_whitespace() || character.is_control()).collect();
    let words: Vec<&str> = words.into_iter().filter(|word| !word.is_empty()).collect();
    if words.is_empty() && !bytes.is_empty() { "unprintable bytes".to_string() } else { words.join(" ") }
}

/// Speaks to one server.
pub struct Client<'a> {
    /// `host:port`.
    pub address: &'a str,
    /// Asked while waiting.
    pub give_up: &'a dyn Fn() -> bool,
}

impl Client<'_> {
    pub fn get(&self, path: &str, within: Duration) -> Result<Answer, HttpError> {
        self.request(&format!("GET {path} HTTP/1.1\r\nHost: {}\r\nConnection: close\r\n\r\n", self.address), within)
    }

    /// Without a body where `body` is `null`.
    pub fn post(&self, path: &str, body: &Value, within: Duration) -> Result<Answer, HttpError> {
        let body = if body.is_null() { String::new() } else { body.to_string() };
        let head = format!(
            "POST {path} HTTP/1.1\r\nHost: {}\r\nConnection: close\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n",
            self.address,
            body.len()
        );
        self.request(&(head + &body), within)
    }

    fn request(&self, request: &str, within: Duration) -> Result<Answer, HttpError> {
        let deadline = Instant::now() + within;
        let unreachable = |error: std::io::Error| HttpError::Unreachable(error.to_string());
        let mut stream = self.connect(deadline, within)?;
        stream.set_write_timeout(Some(within)).map_err(unreachable)?;
        stream.write_all(request.as_bytes()).map_err(|error| match error.kind() {
            ErrorKind::WouldBlock | ErrorKind::TimedOut => HttpError::TimedOut(within),
            _ => unreachable(error),
        })?;
        let mut received = Received { client: self, stream, deadline, within, bytes: Vec::new(), read: 0, ended: false };
        loop {
            let answer = received.answer()?;
            // Interim answers (1xx) come before the one that counts.
            if answer.status >= 200 {
                return Ok(answer);
            }
        }
    }

    fn connect(&self, deadline: Instant, within: Duration) -> Result<TcpStream, HttpError> {
        let unreachable = |error: std::io::Error| HttpError::Unreachable(error.to_string());
        let mut last = HttpError::Unreachable("its name has no address".to_string());
        for address in self.address.to_socket_addrs().map_err(unreachable)? {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(HttpError::TimedOut(within));
            }
            match TcpStream::connect_timeout(&address, left) {
                Ok(stream) => return Ok(stream),
                Err(error) => last = unreachable(error),
            }
        }
        Err(last)
    }
}

/// An answer on its way.
struct Received<'a> {
    client: &'a Client<'a>,
    stream: TcpStream,
    deadline: Instant,
    within: Duration,
    bytes: Vec<u8>,
    /// Bytes of `bytes` that have been taken.
    read: usize,
    ended: bool,
}

impl Received<'_> {
    fn answer(&mut self) -> Result<Answer, HttpError> {
        let status_line = self.line()?;
        let status = status_of(&status_line).ok_or_else(|| HttpError::NotHttp(excerpt(status_line.as_bytes())))?;
        let (mut length, mut chunked) = (None, false);
        let mut head = status_line.len();
        loop {
            let line = self.line()?;
            head += line.len() + 2;
            if line.is_empty() {
                break;
            }
            if head > MOST_HEAD {
                return Err(HttpError::TooLong(MOST_HEAD));
            }
            let (name, value) = line.split_once(':').ok_or_else(|| HttpError::NotHttp(excerpt(line.as_bytes())))?;
            let value = value.trim();
            if name.eq_ignore_ascii_case("content-length") {
                let bytes = value.parse::<usize>().map_err(|_| HttpError::NotHttp(excerpt(line.as_bytes())))?;
                length = Some(bytes);
            } else if name.eq_ignore_ascii_case("transfer-encoding") {
                chunked = value.to_ascii_lowercase().ends_with("chunked");
            }
        }
        let body = match length {
            _ if status < 200 || status == 204 || status == 304 => Vec::new(),
            _ if chunked => self.chunks()?,
            Some(length) => self.take(length)?,
            None => self.until_closed()?,
        };
        Ok(Answer { status, body })
    }

    fn chunks(&mut self) -> Result<Vec<u8>, HttpError> {
        let mut body = Vec::new();
        loop {
            let line = self.line()?;
            let digits = line.split(';').next().unwrap_or_default().trim();
            let length = usize::from_str_radix(digits, 16).map_err(|_| HttpError::NotHttp(excerpt(line.as_bytes())))?;
            if length == 0 {
                // Trailers, up to an empty line.
                while !self.line()?.is_empty() {}
                return Ok(body);
            }
            if length > MOST_BODY - body.len() {
                return Err(HttpError::TooLong(MOST_BODY));
            }
            body.extend(self.take(length)?);
            self.line()?;
        }
    }

    fn until_closed(&mut self) -> Result<Vec<u8>, HttpError> {
        while !self.ended {
            if self.bytes.len() - self.read > MOST_BODY {
                return Err(HttpError::TooLong(MOST_BODY));
            }
            self.more()?;
        }
        Ok(self.bytes.split_off(self.read))
    }

    fn take(&mut self, length: usize) -> Result<Vec<u8>, HttpError> {
        if length > MOST_BODY {
            return Err(HttpError::TooLong(MOST_BODY));
        }
        while self.bytes.len() - self.read < length {
            self.more_or_cut()?;
        }
        let taken = self.bytes[self.read..self.read + length].to_vec();
        self.read += length;
        Ok(taken)
    }

    /// Without the line break.
    fn line(&mut self) -> Result<String, HttpError> {
        loop {
            let unread = &self.bytes[self.read..];
            if let Some(length) = unread.iter().position(|&byte| byte == b'\n') {
                let line = String::from_utf8_lossy(&unread[..length]).trim_end_matches('\r').to_string();
                self.read += length + 1;
                return Ok(line);
            }
            if unread.len() > MOST_HEAD {
                return Err(HttpError::NotHttp(excerpt(unread)));
            }
            self.more_or_cut()?;
        }
    }

    fn more_or_cut(&mut self) -> Result<(), HttpError> {
        self.more()?;
        match (self.ended, self.read) {
            (false, _) => Ok(()),
            (true, 0) if !self.bytes.is_empty() => Err(HttpError::NotHttp(excerpt(&self.bytes))),
            (true, _) => Err(HttpError::Cut),
        }
    }

    /// Receives at least a byte, or notes the end.
    fn more(&mut self) -> Result<(), HttpError> {
        let mut buffer = [0; 16 << 10];
        loop {
            let left = self.deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(HttpError::TimedOut(self.within));
            }
            if (self.client.give_up)() {
                return Err(HttpError::GivenUp);
            }
            let wait = left.min(TICK);
            self.stream.set_read_timeout(Some(wait)).map_err(|error| HttpError::Unreachable(error.to_string()))?;
            match self.stream.read(&mut buffer) {
                Ok(0) => {
                    self.ended = true;
                    return Ok(());
                }
                Ok(length) => {
                    self.bytes.extend_from_slice(&buffer[..length]);
                    return Ok(());
                }
                Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut | ErrorKind::Interrupted) => {}
                Err(_) => return Err(HttpError::Cut),
            }
        }
    }
}

/// Of `HTTP/1.1 200 OK`.
fn status_of(line: &str) -> Option<u16> {
    let mut words = line.split(' ');
    let version = words.next()?;
    let status = words.next()?.parse().ok()?;
    (version.starts_with("HTTP/1.") && (100..1000).contains(&status)).then_some(status)
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::*;

    /// Answers one request with the pieces, a moment between them; what the client made of it, and what it had sent.
    fn exchange(pieces: &[&[u8]], body: &Value) -> (Result<Answer, HttpError>, String) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap().to_string();
        std::thread::scope(|scope| {
            let server = scope.spawn(move || {
                let (mut stream, _) = listener.accept().unwrap();
                let mut request = vec![0; 4096];
                let length = stream.read(&mut request).unwrap();
                for piece in pieces {
                    let _ = stream.write_all(piece);
                    std::thread::sleep(Duration::from_millis(5));
                }
                String::from_utf8_lossy(&request[..length]).into_owned()
            });
            let client = Client { address: &address, give_up: &|| false };
            let answer = client.post("/x?y=1", body, Duration::from_secs(20));
            (answer, server.join().unwrap())
        })
    }

    fn answer(pieces: &[&[u8]]) -> Result<Answer, HttpError> {
        exchange(pieces, &Value::Null).0
    }

    #[test]
    fn requests_and_answers_of_every_length() {
        let (answer_1, request) =
            exchange(&[b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\n{\"a\"", b":12}..."], &serde_json::json!({"b": [1]}));
        assert_eq!(answer_1.clone().unwrap().body, b"{\"a\":12}.");
        assert_eq!((answer_1.clone().unwrap().json(), answer_1.unwrap().ok()), (Value::Null, true));
        assert!(
            request.starts_with("POST /x?y=1 HTTP/1.1\r\n") && request.ends_with("Content-Length: 9\r\n\r\n{\"b\":[1]}"),
            "{request}"
        );
        let chunked =
            answer(&[b"HTTP/1.1 404 No\r\nTransfer-Encoding: chunked\r\n\r\n3;x=y\r\nab", b"c\r\n2\r\nde\r", b"\n0\r\n\r\n"]);
        assert_eq!(chunked, Ok(Answer { status: 404, body: b"abcde".to_vec() }));
        let until_closed = answer(&[b"HTTP/1.0 200\r\n\r\nuntil", b" closed"]);
        assert_eq!(until_closed, Ok(Answer { status: 200, body: b"until closed".to_vec() }));
        let interim = answer(&[b"HTTP/1.1 100 Continue\r\n\r\n", b"HTTP/1.1 204 None\r\n\r\n"]);
        assert_eq!(interim, Ok(Answer { status: 204, body: Vec::new() }));
    }

    #[test]
    fn garbage_is_named_and_nothing_is_endless() {
        assert_eq!(answer(&[b"hello\x00 there\n\n"]), Err(HttpError::NotHttp("hello there".into())));
        assert_eq!(answer(&[b"\x16\x03\x01"]), Err(HttpError::NotHttp("unprintable bytes".into())));
        assert_eq!(answer(&[b"HTTP/1.1 abc\r\n\r\n"]), Err(HttpError::NotHttp("HTTP/1.1 abc".into())));
        assert_eq!(
            answer(&[b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n"]),
            Err(HttpError::NotHttp("Content-Length: -1".into()))
        );
        assert_eq!(answer(&[b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\nabc"]), Err(HttpError::Cut));
        assert_eq!(answer(&[b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999\r\n\r\n"]), Err(HttpError::TooLong(MOST_BODY)));
        let huge = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nffffffffffffffff\r\n";
        assert_eq!(answer(&[huge]), Err(HttpError::TooLong(MOST_BODY)));
        assert_eq!(answer(&[&vec![b'a'; 100_000]]).map_err(|error| matches!(error, HttpError::NotHttp(_))), Err(true));
        let header = [b"HTTP/1.1 200 OK\r\n".to_vec(), b"a: b\r\n".repeat(20_000)].concat();
        assert_eq!(answer(&[&header]), Err(HttpError::TooLong(MOST_HEAD)));
        assert_eq!(answer(&[]), Err(HttpError::Cut));
    }

    #[test]
    fn silence_ends_with_the_time_or_the_patience() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let within = Duration::from_millis(150);
        let patient = Client { address: &address, give_up: &|| false };
        assert_eq!(patient.get("/", within), Err(HttpError::TimedOut(within)));
        let impatient = Client { address: &address, give_up: &|| true };
        assert_eq!(impatient.get("/", Duration::from_secs(600)), Err(HttpError::GivenUp));
        drop(listener);
        assert!(matches!(patient.get("/", within), Err(HttpError::Unreachable(_))));
        let nowhere = Client { address: "no.such.host.invalid:1", give_up: &|| false };
        assert!(matches!(nowhere.get("/", within), Err(HttpError::Unreachable(_))));
    }
}
