//! What ranks say to each other when a connection begins, over `wire`.

use std::io;
use std::net::TcpStream;
use std::time::Instant;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::wire::{self, HandshakeError, Protocol, Token};

/// Version of everything that ranks say to each other. Ranks of different versions do not meet.
pub const PROTOCOL: u32 = 2;

const RANKS: Protocol = Protocol { magic: *b"LEARNER\0", version: PROTOCOL, side: "rank" };

/// The most bytes of a control message: a table of ten thousand ranks fits.
const LONGEST_FRAME: usize = 4 << 20;

/// What a rank asks of a port.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Request {
    pub(super) run_id: String,
    pub(super) rank: usize,
    pub(super) purpose: Purpose,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Purpose {
    /// To the coordinator: be part of the world.
    Join { world_size: usize, host: String },
    /// To a rank: carry the messages of one group.
    Link { group: String },
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Reply {
    Accepted,
    Refused(String),
    /// The world is whole. It may be about to end, and its run to begin again.
    Full(String),
}

impl Reply {
    /// Why the caller is not let in.
    pub(super) fn reason(&self) -> Option<&str> {
        match self {
            Reply::Accepted => None,
            Reply::Refused(reason) | Reply::Full(reason) => Some(reason),
        }
    }
}

/// A rank that has proved the token and waits for a reply.
pub(super) type Caller = wire::Caller<Request>;

/// The calling rank's side of a connection, up to the reply.
pub(super) fn call(stream: &TcpStream, token: &Token, request: &Request, deadline: Instant) -> Result<Reply, HandshakeError> {
    wire::call(stream, &RANKS, token, request, deadline)
}

/// The listening rank's side of a connection, up to the request.
pub(super) fn answer(stream: TcpStream, token: &Token, deadline: Instant) -> Result<Caller, HandshakeError> {
    wire::answer(stream, &RANKS, token, deadline)
}

/// Receives one control message; without a deadline it waits for ever.
pub(super) fn read_frame<T: DeserializeOwned>(stream: &TcpStream, deadline: Option<Instant>) -> io::Result<T> {
    wire::read_frame(stream, LONGEST_FRAME, deadline)
}
