//! The emulated GPU as this process sees it: its libraries, loaded from the binary itself, and what they say of the kernels that ran.
//!
//! The libraries carry NVIDIA's names. They are loaded before cudarc looks for any, so that the loader gives cudarc these: the same
//! Rust code then drives them. Settings, findings and counters belong to the process, not to one of its emulated devices.

use std::ffi::{CStr, CString, c_char, c_void};
use std::sync::{Mutex, OnceLock, PoisonError};

use serde::{Deserialize, Serialize};

use super::embedded;
use super::error::{DeviceError, raise};

/// How the emulated GPUs of this process behave.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EmulatorSettings {
    pub devices: usize,
    /// Operating-system threads that run blocks; 0: as many as there are cores.
    pub threads: usize,
    /// Finds accesses out of bounds, misaligned or after a free, and reads of what nobody wrote.
    pub check_memory: bool,
    /// Finds races in shared memory.
    pub check_races: bool,
    /// Counts sectors, bytes, bank conflicts, tensor-core operations and barriers.
    pub count: bool,
    /// Asynchronous copies arrive when they are waited for, not at once.
    pub late_copies: bool,
    /// Threads and blocks start in descending order.
    pub reverse: bool,
    /// A stream runs nothing until somebody waits for it.
    pub lazy_streams: bool,
    pub multiprocessors: usize,
    /// Of each device.
    pub memory_bytes: u64,
    /// Whether a finding ends the run at the next wait for the device; tests that plant faults read the findings instead.
    pub stop_at_findings: bool,
}

impl Default for EmulatorSettings {
    fn default() -> EmulatorSettings {
        EmulatorSettings {
            devices: 1,
            threads: 0,
            check_memory: true,
            check_races: true,
            count: false,
            late_copies: false,
            reverse: false,
            lazy_streams: false,
            multiprocessors: 4,
            memory_bytes: 4 << 30,
            stop_at_findings: true,
        }
    }
}

/// `emulator::Settings` of `cuda/emulator/runtime.h`.
#[repr(C)]
struct RawSettings {
    devices: i32,
    threads: i32,
    memory: i32,
    races: i32,
    counters: i32,
    late_copies: i32,
    reverse: i32,
    lazy_streams: i32,
    multiprocessors: i32,
    memory_bytes: i64,
}

impl From<&EmulatorSettings> for RawSettings {
    fn from(settings: &EmulatorSettings) -> RawSettings {
        RawSettings {
            devices: settings.devices as i32,
            threads: settings.threads as i32,
            memory: settings.check_memory.into(),
            races: settings.check_races.into(),
            counters: settings.count.into(),
            late_copies: settings.late_copies.into(),
            reverse: settings.reverse.into(),
            lazy_streams: settings.lazy_streams.into(),
            multiprocessors: settings.multiprocessors as i32,
            memory_bytes: settings.memory_bytes as i64,
        }
    }
}

/// What a checker found, by kernel and place; the same thing at the same place is there once.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Finding {
    pub kind: String,
    pub kernel: String,
    /// `file:line`
    pub place: String,
    /// -1 where there is none.
    pub block: [i32; 3],
    pub thread: i32,
    /// Or offset in shared memory.
    pub address: u64,
    pub text: String,
    /// The other access of a race.
    pub other_place: String,
    pub other_thread: i32,
}

impl std::fmt::Display for Finding {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}", self.kind)?;
        for (word, name) in [("in", &self.kernel), ("at", &self.place)] {
            if !name.is_empty() {
                write!(f, " {word} {name}")?;
            }
        }
        if self.thread >= 0 {
            let [x, y, z] = self.block;
            write!(f, ", block ({x}, {y}, {z}), thread {}", self.thread)?;
        }
        if self.address != 0 {
            write!(f, ", address {:#x}", self.address)?;
        }
        write!(f, ": {}", self.text)?;
        if !self.other_place.is_empty() {
            write!(f, " (the other: {}, thread {})", self.other_place, self.other_thread)?;
        }
        Ok(())
    }
}

/// Counters of one source line, or of a whole kernel. Sectors have 32 bytes; requests are those of whole warps.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct LineCounters {
    pub place: String,
    pub global_requests: u64,
    pub global_sectors: u64,
    pub global_sectors_least: u64,
    pub shared_requests: u64,
    pub shared_wavefronts: u64,
    pub shared_wavefronts_least: u64,
    pub tensor_core_operations: u64,
    pub barriers: u64,
}

/// Counters of one kernel, summed over its launches.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct KernelCounters {
    pub kernel: String,
    pub launches: u64,
    pub blocks: u64,
    pub threads: u64,
    pub bytes_read: u64,
    pub bytes_written: u64,
    pub total: LineCounters,
    pub lines: Vec<LineCounters>,
}

type Report = unsafe extern "C" fn(text: *mut c_char, capacity: usize) -> usize;
type Action = unsafe extern "C" fn();

/// The loaded libraries.
pub struct Emulator {
    configure: unsafe extern "C" fn(settings: *const RawSettings),
    findings: Report,
    clear_findings: Action,
    counters: Report,
    clear_counters: Action,
    settings: Mutex<EmulatorSettings>,
}

static LOADED: OnceLock<Result<Emulator, DeviceError>> = OnceLock::new();

impl Emulator {
    /// Loads the libraries when it is called first, and gives all emulated devices of the process these settings.
    pub fn start(settings: &EmulatorSettings) -> Result<&'static Emulator, DeviceError> {
        let emulator = LOADED.get_or_init(Emulator::load).as_ref().map_err(DeviceError::clone)?;
        emulator.configure(settings);
        Ok(emulator)
    }

    /// Whether this process runs on emulated GPUs.
    pub fn is_loaded() -> bool {
        matches!(LOADED.get(), Some(Ok(_)))
    }

    fn load() -> Result<Emulator, DeviceError> {
        if let Some(reason) = embedded::NO_EMULATOR {
            return Err(DeviceError::NotBuilt(reason));
        }
        #[cfg(target_arch = "x86_64")]
        if !(is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma")) {
            return Err(DeviceError::Emulator(
                "it is compiled for processors with AVX2 and FMA, and this one lacks them".to_string(),
            ));
        }
        let libraries: Vec<Library> =
            embedded::EMULATED_LIBRARIES.iter().map(|(name, image)| Library::load(name, image)).collect::<Result<_, _>>()?;
        let Some(driver) = libraries.first() else {
            return Err(DeviceError::Emulator("its libraries are not embedded".to_string()));
        };
        // SAFETY: runtime.h declares these functions with these types.
        unsafe {
            Ok(Emulator {
                configure: std::mem::transmute::<*mut c_void, unsafe extern "C" fn(*const RawSettings)>(
                    driver.symbol("emulator_configure")?,
                ),
                findings: std::mem::transmute::<*mut c_void, Report>(driver.symbol("emulator_findings")?),
                clear_findings: std::mem::transmute::<*mut c_void, Action>(driver.symbol("emulator_clear_findings")?),
                counters: std::mem::transmute::<*mut c_void, Report>(driver.symbol("emulator_counters")?),
                clear_counters: std::mem::transmute::<*mut c_void, Action>(driver.symbol("emulator_clear_counters")?),
                settings: Mutex::new(EmulatorSettings::default()),
            })
        }
    }

    pub fn configure(&self, settings: &EmulatorSettings) {
        *self.settings.lock().unwrap_or_else(PoisonError::into_inner) = *settings;
        // SAFETY: the library copies the settings.
        unsafe { (self.configure)(&RawSettings::from(settings)) }
    }

    pub fn findings(&self) -> Vec<Finding> {
        parsed("findings", self.findings)
    }

    pub fn counters(&self) -> Vec<KernelCounters> {
        parsed("counters", self.counters)
    }

    pub fn clear_findings(&self) {
        // SAFETY: no arguments, callable at any time.
        unsafe { (self.clear_findings)() }
    }

    pub fn clear_counters(&self) {
        // SAFETY: as above.
        unsafe { (self.clear_counters)() }
    }

    fn settings(&self) -> EmulatorSettings {
        *self.settings.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What is checked, and which device a single process uses: `, 1 of 8 devices in use, checks memory`.
    pub fn describe(&self) -> String {
        let EmulatorSettings { devices, check_memory, check_races, .. } = self.settings();
        let devices = if devices > 1 { format!(", 1 of {devices} devices in use") } else { String::new() };
        let checks = match (check_memory, check_races) {
            (true, true) => "memory and races",
            (true, false) => "memory",
            (false, true) => "races",
            (false, false) => "nothing",
        };
        format!("{devices}, checks {checks}")
    }

    /// `; FINDING`, or nothing.
    pub fn first_finding(&self) -> String {
        self.findings().first().map(|finding| format!("; {finding}")).unwrap_or_default()
    }

    /// Ends the run if there is a finding, unless the settings say that somebody reads them.
    pub fn raise_findings(&self) {
        if self.settings().stop_at_findings {
            let findings = self.findings();
            if let Some(first) = findings.first() {
                raise(format!("the emulated GPU found {first}; {} findings in all", findings.len()));
            }
        }
    }
}

/// The JSON of a report, parsed. The length is asked for until it fits: devices may be adding to it.
fn parsed<T: for<'de> Deserialize<'de>>(what: &str, report: Report) -> Vec<T> {
    let mut text = vec![0u8; 4096];
    loop {
        // SAFETY: the library writes at most as many bytes as it is told there are.
        let needed = unsafe { report(text.as_mut_ptr().cast::<c_char>(), text.len()) };
        if needed < text.len() {
            text.truncate(needed);
            break;
        }
        text.resize(needed + 4096, 0);
    }
    let end = text.iter().position(|&byte| byte == 0).unwrap_or(text.len());
    serde_json::from_slice(&text[..end])
        .unwrap_or_else(|error| raise(format!("the emulated GPU's {what} cannot be read: {error}")))
}

/// A shared library in memory, loaded for good.
struct Library {
    handle: *mut c_void,
}

#[cfg(target_os = "linux")]
impl Library {
    /// The image must carry `name` as its SONAME: that is how it is found again under its bare name.
    fn load(name: &str, image: &[u8]) -> Result<Library, DeviceError> {
        use std::io::Write;
        use std::os::fd::{AsRawFd, IntoRawFd};
        let problem = |problem: String| DeviceError::Emulator(format!("{name}: {problem}"));
        let file = rustix::fs::memfd_create(name, rustix::fs::MemfdFlags::CLOEXEC).map_err(|error| problem(error.to_string()))?;
        let mut file = std::fs::File::from(file);
        file.write_all(image).map_err(|error| problem(error.to_string()))?;
        let path = format!("/proc/self/fd/{}", file.as_raw_fd());
        let path = CString::new(path).map_err(|error| problem(error.to_string()))?;
        // SAFETY: the image is one of ours; its initialisers only set up its own state.
        let handle = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW | libc::RTLD_GLOBAL) };
        // The loader knows a library by its path: the descriptor stays open so that the path is never used again.
        let _kept_open = file.into_raw_fd();
        if handle.is_null() { Err(problem(loader_error())) } else { Ok(Library { handle }) }
    }

    fn symbol(&self, name: &str) -> Result<*mut c_void, DeviceError> {
        let problem = |problem: String| DeviceError::Emulator(format!("{name}: {problem}"));
        let name = CString::new(name).map_err(|error| problem(error.to_string()))?;
        // SAFETY: the library is loaded.
        let symbol = unsafe { libc::dlsym(self.handle, name.as_ptr()) };
        if symbol.is_null() { Err(problem(loader_error())) } else { Ok(symbol) }
    }
}

#[cfg(target_os = "linux")]
fn loader_error() -> String {
    // SAFETY: dlerror gives null or a string of this thread.
    unsafe {
        let error = libc::dlerror();
        if error.is_null() { "no such thing".to_string() } else { CStr::from_ptr(error).to_string_lossy().into_owned() }
    }
}
