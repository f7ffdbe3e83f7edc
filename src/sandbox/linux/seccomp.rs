//! The system call filter: a deny list of what no contained program needs and what has broken sandboxes before.
//!
//! Programs for RL tasks use a wide and changing set of system calls, so an allow list would turn library updates into
//! failed tests. The list denies instead: other processes' memory, kernel objects shared across sandboxes, further
//! namespaces and mounts, rare network families, and everything that drives the machine.

use std::io;

use super::wire::{SetUpError, Step};
use crate::sandbox::Tier;

/// One instruction of classic BPF, as the kernel lays it out.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Instruction {
    code: u16,
    jump_true: u8,
    jump_false: u8,
    operand: u32,
}

const LOAD: u16 = 0x20; // BPF_LD | BPF_W | BPF_ABS
const JUMP_EQUAL: u16 = 0x15; // BPF_JMP | BPF_JEQ | BPF_K
const JUMP_AT_LEAST: u16 = 0x35; // BPF_JMP | BPF_JGE | BPF_K
const JUMP_ANY_BIT: u16 = 0x45; // BPF_JMP | BPF_JSET | BPF_K
const RETURN: u16 = 0x06; // BPF_RET | BPF_K

const ALLOW: u32 = 0x7fff_0000;
const KILL_PROCESS: u32 = 0x8000_0000;
const ERRNO: u32 = 0x0005_0000;

/// Offsets in `struct seccomp_data`; arguments are little-endian 64-bit words.
const NUMBER: u32 = 0;
const ARCHITECTURE: u32 = 4;
const ARGUMENTS: u32 = 16;

#[cfg(target_arch = "x86_64")]
const NATIVE: u32 = 0xc000_003e;
#[cfg(target_arch = "aarch64")]
const NATIVE: u32 = 0xc000_00b7;
#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
compile_error!("the sandbox's system call filter knows x86-64 and aarch64");

/// From here on x86-64 system calls are of the x32 kind, a second door to the same kernel.
const X32: u32 = 0x4000_0000;

/// All flags of clone that make a namespace: NEWTIME, NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET.
const NAMESPACES: u32 = 0x80 | 0x2_0000 | 0x200_0000 | 0x400_0000 | 0x800_0000 | 0x1000_0000 | 0x2000_0000 | 0x4000_0000;

/// Refused with EPERM in both tiers.
const DENIED: &[libc::c_long] = &[
    // Other processes: their memory and descriptors.
    libc::SYS_ptrace,
    libc::SYS_process_vm_readv,
    libc::SYS_process_vm_writev,
    libc::SYS_process_madvise,
    libc::SYS_pidfd_getfd,
    libc::SYS_kcmp,
    // Kernel objects that outlive or reach across sandboxes, or count against nobody. (One io_setup can take all the events
    // that the machine has.)
    libc::SYS_add_key,
    libc::SYS_request_key,
    libc::SYS_keyctl,
    libc::SYS_shmget,
    libc::SYS_shmat,
    libc::SYS_msgget,
    libc::SYS_semget,
    libc::SYS_io_setup,
    libc::SYS_memfd_create,
    libc::SYS_memfd_secret,
    libc::SYS_fanotify_init,
    // Wide or young kernel interfaces.
    libc::SYS_bpf,
    libc::SYS_perf_event_open,
    libc::SYS_userfaultfd,
    libc::SYS_io_uring_setup,
    libc::SYS_io_uring_enter,
    libc::SYS_io_uring_register,
    libc::SYS_lookup_dcookie,
    // Mounts, roots, namespaces.
    libc::SYS_mount,
    libc::SYS_umount2,
    libc::SYS_pivot_root,
    libc::SYS_chroot,
    libc::SYS_open_tree,
    libc::SYS_move_mount,
    libc::SYS_fsopen,
    libc::SYS_fsconfig,
    libc::SYS_fsmount,
    libc::SYS_fspick,
    libc::SYS_mount_setattr,
    libc::SYS_unshare,
    libc::SYS_setns,
    libc::SYS_open_by_handle_at,
    libc::SYS_name_to_handle_at,
    libc::SYS_quotactl,
    libc::SYS_quotactl_fd,
    // The machine: modules, clocks, swap, reboot, accounting, logs.
    libc::SYS_init_module,
    libc::SYS_finit_module,
    libc::SYS_delete_module,
    libc::SYS_kexec_load,
    libc::SYS_kexec_file_load,
    libc::SYS_reboot,
    libc::SYS_swapon,
    libc::SYS_swapoff,
    libc::SYS_acct,
    libc::SYS_syslog,
    libc::SYS_settimeofday,
    libc::SYS_clock_settime,
    libc::SYS_clock_adjtime,
    libc::SYS_adjtimex,
    libc::SYS_sethostname,
    libc::SYS_setdomainname,
    libc::SYS_vhangup,
    // Memory placement and locking.
    libc::SYS_mbind,
    libc::SYS_migrate_pages,
    libc::SYS_move_pages,
    libc::SYS_set_mempolicy,
    libc::SYS_mlock,
    libc::SYS_mlock2,
    libc::SYS_mlockall,
];

#[cfg(target_arch = "x86_64")]
const DENIED_HERE: &[libc::c_long] =
    &[libc::SYS_iopl, libc::SYS_ioperm, libc::SYS_modify_ldt, libc::SYS_uselib, libc::SYS_ustat, libc::SYS_sysfs];
#[cfg(not(target_arch = "x86_64"))]
const DENIED_HERE: &[libc::c_long] = &[];

/// Refused in tier B only, where these name spaces are the machine's own.
const DENIED_SHARED: &[libc::c_long] = &[libc::SYS_mq_open, libc::SYS_mq_unlink];

/// In tier B, of the caller's user id, the machine's processes are within reach: their scheduling is off, but for the
/// calling thread, which is 0. The number of the argument that names the process.
const ON_A_PROCESS: &[(libc::c_long, u32)] = &[
    (libc::SYS_sched_setaffinity, 0),
    (libc::SYS_sched_setscheduler, 0),
    (libc::SYS_sched_setparam, 0),
    (libc::SYS_sched_setattr, 0),
    (libc::SYS_setpriority, 1),
    (libc::SYS_ioprio_set, 1),
];
/// What these two may name beside a process (0 and 1) is a group or a user, all of whose processes they change.
const ON_WHOM: &[(libc::c_long, u32)] = &[(libc::SYS_setpriority, libc::PRIO_PROCESS), (libc::SYS_ioprio_set, 1)];

/// Socket families that stay: in tier A they end in the run's own network namespace, which has nothing but loopback.
const FAMILIES: [u32; 3] = [libc::AF_UNIX as u32, libc::AF_INET as u32, libc::AF_INET6 as u32];

/// A filter, ready for the kernel.
pub struct Filter {
    instructions: Vec<Instruction>,
}

impl Filter {
    pub fn new(tier: Tier) -> Filter {
        let mut filter = Filter { instructions: Vec::with_capacity(256) };
        filter.load(ARCHITECTURE);
        filter.unless(JUMP_EQUAL, NATIVE, KILL_PROCESS);
        filter.load(NUMBER);
        if cfg!(target_arch = "x86_64") {
            filter.when(JUMP_AT_LEAST, X32, KILL_PROCESS);
        }
        for &number in DENIED.iter().chain(DENIED_HERE) {
            filter.when(JUMP_EQUAL, number as u32, refusal(libc::EPERM));
        }
        // The flags of clone3 lie in memory, where a filter cannot look; C libraries fall back to clone.
        filter.when(JUMP_EQUAL, libc::SYS_clone3 as u32, refusal(libc::ENOSYS));
        filter.argument(libc::SYS_clone, 0, |filter| filter.when(JUMP_ANY_BIT, NAMESPACES, refusal(libc::EPERM)));
        // Pushing input into a terminal (TIOCSTI) and the console's selection (TIOCLINUX).
        filter.argument(libc::SYS_ioctl, 1, |filter| {
            filter.when(JUMP_EQUAL, libc::TIOCSTI as u32, refusal(libc::EPERM));
            filter.when(JUMP_EQUAL, libc::TIOCLINUX as u32, refusal(libc::EPERM));
        });
        // Limits of another process of the same user id: the one that keeps the run, in tier A, or any other of the user's.
        filter.argument(libc::SYS_prlimit64, 0, |filter| filter.unless(JUMP_EQUAL, 0, refusal(libc::EPERM)));
        filter.argument(libc::SYS_socketpair, 0, |filter| {
            filter.unless(JUMP_EQUAL, libc::AF_UNIX as u32, refusal(libc::EAFNOSUPPORT));
        });
        match tier {
            Tier::A => filter.argument(libc::SYS_socket, 0, |filter| {
                for family in FAMILIES {
                    filter.when(JUMP_EQUAL, family, ALLOW);
                }
                filter.give(refusal(libc::EAFNOSUPPORT));
            }),
            Tier::B => {
                filter.when(JUMP_EQUAL, libc::SYS_socket as u32, refusal(libc::EACCES));
                for &number in DENIED_SHARED {
                    filter.when(JUMP_EQUAL, number as u32, refusal(libc::EPERM));
                }
                // A pair of datagram sockets can be sent elsewhere: to any socket of the machine that has a path.
                filter.argument(libc::SYS_socketpair, 1, |filter| {
                    filter.when(JUMP_ANY_BIT, libc::SOCK_DGRAM as u32, refusal(libc::EACCES));
                });
                for &(number, index) in ON_A_PROCESS {
                    filter.argument(number, index, |filter| filter.unless(JUMP_EQUAL, 0, refusal(libc::EPERM)));
                }
                for &(number, process) in ON_WHOM {
                    filter.argument(number, 0, |filter| filter.unless(JUMP_EQUAL, process, refusal(libc::EPERM)));
                }
            }
        }
        filter.give(ALLOW);
        filter
    }

    fn load(&mut self, offset: u32) {
        self.instructions.push(Instruction { code: LOAD, jump_true: 0, jump_false: 0, operand: offset });
    }

    fn give(&mut self, outcome: u32) {
        self.instructions.push(Instruction { code: RETURN, jump_true: 0, jump_false: 0, operand: outcome });
    }

    /// Ends with `outcome` if the loaded word passes the test.
    fn when(&mut self, test: u16, operand: u32, outcome: u32) {
        self.instructions.push(Instruction { code: test, jump_true: 0, jump_false: 1, operand });
        self.give(outcome);
    }

    fn unless(&mut self, test: u16, operand: u32, outcome: u32) {
        self.instructions.push(Instruction { code: test, jump_true: 1, jump_false: 0, operand });
        self.give(outcome);
    }

    /// For one system call, tests the low word of an argument; afterwards the number is loaded again.
    fn argument(&mut self, number: libc::c_long, index: u32, tests: impl FnOnce(&mut Filter)) {
        let jump = self.instructions.len();
        self.instructions.push(Instruction { code: JUMP_EQUAL, jump_true: 0, jump_false: 0, operand: number as u32 });
        self.load(ARGUMENTS + 8 * index);
        tests(self);
        self.load(NUMBER);
        // A filter is at most a few instructions per argument, far below the 255 that a jump can skip.
        self.instructions[jump].jump_false = (self.instructions.len() - jump - 1) as u8;
    }

    /// The instructions as bytes in hexadecimal, for the warm interpreter.
    pub fn to_hex(&self) -> String {
        let mut hex = String::with_capacity(self.instructions.len() * 16);
        for instruction in &self.instructions {
            let code = instruction.code.to_ne_bytes();
            let operand = instruction.operand.to_ne_bytes();
            let jumps = [instruction.jump_true, instruction.jump_false];
            hex.extend(code.iter().chain(&jumps).chain(&operand).map(|byte| format!("{byte:02x}")));
        }
        hex
    }

    /// Puts the filter on this process and all it will start. No new privileges must be set before.
    pub fn install(&self) -> Result<(), SetUpError> {
        #[repr(C)]
        struct Program {
            length: u16,
            instructions: *const Instruction,
        }
        let program = Program { length: self.instructions.len() as u16, instructions: self.instructions.as_ptr() };
        const SET_MODE_FILTER: libc::c_long = 1;
        // SAFETY: the kernel copies `length` instructions from an array that outlives the call.
        let result = unsafe { libc::syscall(libc::SYS_seccomp, SET_MODE_FILTER, 0, &raw const program) };
        if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()).step("seccomp filter") }
    }
}

fn refusal(errno: i32) -> u32 {
    ERRNO | errno as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Runs the filter as the kernel would.
    fn outcome(filter: &Filter, architecture: u32, number: u32, arguments: [u32; 2]) -> u32 {
        let (mut loaded, mut at) = (0, 0);
        loop {
            let instruction = filter.instructions[at];
            let jump = |taken: bool| if taken { instruction.jump_true } else { instruction.jump_false } as usize;
            at += 1;
            match instruction.code {
                LOAD => {
                    loaded = match instruction.operand {
                        NUMBER => number,
                        ARCHITECTURE => architecture,
                        offset => arguments[(offset as usize - ARGUMENTS as usize) / 8],
                    }
                }
                JUMP_EQUAL => at += jump(loaded == instruction.operand),
                JUMP_AT_LEAST => at += jump(loaded >= instruction.operand),
                JUMP_ANY_BIT => at += jump(loaded & instruction.operand != 0),
                _ => return instruction.operand,
            }
        }
    }

    #[test]
    fn denies_what_it_lists_and_nothing_else() {
        let (a, b) = (Filter::new(Tier::A), Filter::new(Tier::B));
        let call = |filter: &Filter, number: libc::c_long, arguments| outcome(filter, NATIVE, number as u32, arguments);
        for filter in [&a, &b] {
            for &number in DENIED {
                assert_eq!(call(filter, number, [0, 0]), refusal(libc::EPERM));
            }
            assert_eq!(call(filter, libc::SYS_read, [0, 0]), ALLOW);
            assert_eq!(call(filter, libc::SYS_clone3, [0, 0]), refusal(libc::ENOSYS));
            assert_eq!(call(filter, libc::SYS_clone, [libc::CLONE_VM as u32 | 17, 0]), ALLOW);
            assert_eq!(call(filter, libc::SYS_clone, [libc::CLONE_NEWUSER as u32 | 17, 0]), refusal(libc::EPERM));
            assert_eq!(call(filter, libc::SYS_ioctl, [0, libc::TIOCSTI as u32]), refusal(libc::EPERM));
            assert_eq!(call(filter, libc::SYS_ioctl, [libc::TIOCSTI as u32, libc::TCGETS as u32]), ALLOW);
            assert_eq!(call(filter, libc::SYS_prlimit64, [0, 7]), ALLOW);
            assert_eq!(call(filter, libc::SYS_prlimit64, [1, 7]), refusal(libc::EPERM));
            assert_eq!(call(filter, libc::SYS_socketpair, [libc::AF_UNIX as u32, 0]), ALLOW);
            assert_eq!(call(filter, libc::SYS_socketpair, [30, 0]), refusal(libc::EAFNOSUPPORT));
            assert_eq!(call(filter, libc::SYS_setpriority, [0, 0]), ALLOW);
            assert_eq!(outcome(filter, 0x4000_0003, libc::SYS_read as u32, [0, 0]), KILL_PROCESS);
        }
        assert_eq!(call(&a, libc::SYS_socket, [libc::AF_INET as u32, 0]), ALLOW);
        assert_eq!(call(&a, libc::SYS_socket, [libc::AF_NETLINK as u32, 0]), refusal(libc::EAFNOSUPPORT));
        assert_eq!(call(&b, libc::SYS_socket, [libc::AF_UNIX as u32, 0]), refusal(libc::EACCES));
        for (kind, outcome) in
            [(libc::SOCK_STREAM, ALLOW), (libc::SOCK_SEQPACKET, ALLOW), (libc::SOCK_DGRAM, refusal(libc::EACCES))]
        {
            let kind = (kind | libc::SOCK_CLOEXEC) as u32;
            assert_eq!(call(&b, libc::SYS_socketpair, [libc::AF_UNIX as u32, kind]), outcome);
            assert_eq!(call(&a, libc::SYS_socketpair, [libc::AF_UNIX as u32, kind]), ALLOW);
        }
        assert_eq!(call(&a, libc::SYS_sched_setaffinity, [7, 8]), ALLOW);
        assert_eq!(call(&b, libc::SYS_sched_setaffinity, [7, 8]), refusal(libc::EPERM));
        assert_eq!(call(&b, libc::SYS_setpriority, [0, 7]), refusal(libc::EPERM));
        assert_eq!(call(&b, libc::SYS_setpriority, [2, 0]), refusal(libc::EPERM));
        if cfg!(target_arch = "x86_64") {
            assert_eq!(outcome(&a, NATIVE, X32 | libc::SYS_read as u32, [0, 0]), KILL_PROCESS);
        }
    }
}
