//! What `build.rs` compiled into the binary.

include!(concat!(env!("OUT_DIR"), "/embedded.rs"));
