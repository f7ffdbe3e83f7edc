//! User ids of the machine for runs.

use std::io;
use std::os::fd::OwnedFd;

use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

/// A block of user ids of the machine that no account and no other sandbox uses. When run by root each running program gets
/// one for itself: the process limit counts per user id and does not bind root.
pub struct HostIds {
    pub first: u32,
    /// Holds the block: the kernel lets one socket have the name and frees it when this process ends, however it ends.
    _lease: OwnedFd,
}

/// Ids in one block: more than any number of runs at once.
pub const BLOCK: u32 = 2048;
/// The first block of a machine where all ids can be used.
const BASE: u32 = 2_000_000;
/// Blocks tried before giving up: sandboxes of other processes hold the ones before.
const BLOCKS: u32 = 64;

impl HostIds {
    pub fn lease() -> io::Result<HostIds> {
        let map = std::fs::read_to_string("/proc/self/uid_map")?;
        let candidates = (0..BLOCKS).filter_map(|block| block_start(&map, block));
        for first in candidates {
            let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::DGRAM, SocketFlags::CLOEXEC, None)?;
            let name = format!("learner-sandbox-ids-{first}");
            match rustix::net::bind(&socket, &SocketAddrUnix::new_abstract_name(name.as_bytes())?) {
                Ok(()) => return Ok(HostIds { first, _lease: socket }),
                Err(rustix::io::Errno::ADDRINUSE) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Err(io::Error::other(format!("no block of {BLOCK} unused user ids in /proc/self/uid_map")))
    }
}

/// The first id of a block: from `BASE` up if those ids exist in this user namespace, else from the top of its largest
/// extent down, below the last ids that "nobody" and its like live among.
fn block_start(uid_map: &str, block: u32) -> Option<u32> {
    let extents = uid_map.lines().filter_map(|line| {
        let mut numbers = line.split_ascii_whitespace().map(str::parse::<u64>);
        let (inside, _, count) = (numbers.next()?.ok()?, numbers.next()?.ok()?, numbers.next()?.ok()?);
        Some((inside, inside + count))
    });
    let extents: Vec<(u64, u64)> = extents.collect();
    let preferred = u64::from(BASE) + u64::from(block) * u64::from(BLOCK);
    if extents.iter().any(|&(start, end)| start <= preferred && preferred + u64::from(BLOCK) <= end) {
        return u32::try_from(preferred).ok();
    }
    let &(start, end) = extents.iter().max_by_key(|(start, end)| end - start)?;
    let first = end.checked_sub(u64::from(BLOCK) * (u64::from(block) + 2))?;
    // Ids of accounts lie below 10,000 by custom.
    if first >= start.max(10_000) { u32::try_from(first).ok() } else { None }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_fit_the_user_namespace() {
        let whole = "         0          0 4294967295\n";
        assert_eq!(block_start(whole, 0), Some(2_000_000));
        assert_eq!(block_start(whole, 2), Some(2_004_096));
        let rootless = "0 1000 1\n1 100000 65536\n";
        assert_eq!(block_start(rootless, 0), Some(65537 - 4096));
        assert_eq!(block_start(rootless, 1), Some(65537 - 6144));
        assert_eq!(block_start("0 1000 1\n", 0), None);
    }

    #[test]
    fn two_leases_are_two_blocks() {
        if !rustix::process::geteuid().is_root() {
            return; // an ordinary user needs none
        }
        let (one, two) = (HostIds::lease().unwrap(), HostIds::lease().unwrap());
        assert_ne!(one.first, two.first);
    }
}
