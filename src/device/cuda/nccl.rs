//! NCCL: one device's end of a communicator, its stream, and the events that order this stream with the device's own.
//!
//! **Non-blocking communicators.** Every call of NCCL returns at once and says that it is in progress; whoever waits polls. So the
//! lock on the handle is never held while something waits for another rank, and whoever learns that a rank is lost can abort the
//! communicator at any moment, also while ranks still meet or connect, which in NCCL happens at the first call.
//!
//! **Order.** What a communicator does runs in a stream of its own, between two events: it begins once everything asked of the device
//! before is done ([`Communicator::follow`]), and what is asked of the device after [`Communicator::lead`] begins once it is done. In
//! between both streams run side by side. Memory needs no more than that: it is given out, used and taken back in the order of the
//! device's stream, and a buffer that the communicator uses is held by the caller until after `lead`.

use std::ffi::{c_char, c_int};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use cudarc::driver::{CudaEvent, CudaStream};
use cudarc::nccl::result::{self, NcclError, NcclStatus};
use cudarc::nccl::sys::{self, ncclResult_t};

use super::CudaDevice;
use super::arguments::Address;
use super::buffers::{Buffer, Precision};
use super::driver::Gpu;
use super::error::DeviceError;

/// `NCCL_API_MAGIC` and the version of the struct of settings, that of cudarc's bindings; NCCL takes older ones and newer ones.
const CONFIG_MAGIC: u32 = 0xcafe_beef;
const CONFIG_VERSION: u32 = 23_000;
/// `NCCL_CONFIG_UNDEF_INT`: as NCCL chooses.
const UNDEFINED: c_int = c_int::MIN;

/// The version of the NCCL that this process finds, as `2.30.0`.
///
/// # Errors
/// One line if there is none.
pub fn nccl_version() -> Result<String, DeviceError> {
    check_present()?;
    let version = result::get_nccl_version().map_err(|error| DeviceError::Nccl(name_of(&error)))?;
    Ok(format!("{}.{}.{}", version / 10_000, version / 100 % 100, version % 100))
}

/// What ranks that are to form a communicator must share: one of them makes it and sends it to the others.
///
/// # Errors
/// One line if there is no NCCL, or no way for it to listen.
pub fn new_communicator_id() -> Result<Vec<u8>, DeviceError> {
    check_present()?;
    let id = result::get_uniqueid().map_err(|error| DeviceError::Nccl(name_of(&error)))?;
    Ok(id.internal.iter().map(|&byte| byte as u8).collect())
}

fn check_present() -> Result<(), DeviceError> {
    // SAFETY: only looks for the library.
    if unsafe { sys::is_culib_present() } { Ok(()) } else { Err(DeviceError::NoNccl) }
}

/// `ncclRemoteError` and the like.
fn name_of(error: &NcclError) -> String {
    format!("{:?}", error.0)
}

/// Why a communicator does not go on.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CommunicatorError {
    #[error("the communicator was ended")]
    Ended,
    #[error("NCCL fails with {0}")]
    Failed(String),
}

/// What every rank of a communicator does at the same time with a buffer that is laid out by rank, in place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SharedCall {
    /// This rank's share is filled: fills the others.
    AllGather,
    /// This rank's share becomes the sum over all ranks; the others are undefined then.
    ReduceScatter,
}

/// One call and where it happens. It borrows nothing: the buffer is held by who makes it, see [`Communicator::submit`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request {
    pub call: SharedCall,
    address: Address,
    precision: Precision,
    /// Numbers of each rank.
    share: usize,
}

impl Request {
    /// Panics if the buffer holds fewer than `share` numbers of each of `ranks` ranks.
    pub fn new(call: SharedCall, buffer: &mut Buffer, share: usize, ranks: usize) -> Request {
        let precision = buffer.precision();
        Request { call, address: buffer.holding(precision, share * ranks), precision, share }
    }

    /// Whether both are of the same buffer, so that one must follow the other.
    pub fn meets(&self, other: &Request) -> bool {
        self.address == other.address
    }

    /// Of this rank's numbers that the call reads.
    pub fn bytes(&self, ranks: usize) -> usize {
        let share = self.share * self.precision.bytes();
        match self.call {
            SharedCall::AllGather => share,
            SharedCall::ReduceScatter => share * ranks,
        }
    }
}

/// A moment in a stream.
pub struct Moment {
    event: CudaEvent,
}

impl Moment {
    /// Whether the stream has got there; on a device that has failed it never does.
    pub fn is_past(&self) -> bool {
        self.event.context().bind_to_thread().is_ok() && self.event.is_complete()
    }

    /// From this moment to a later one, both past; negative if the later one was earlier.
    pub fn seconds_to(&self, later: &Moment) -> f64 {
        self.event.elapsed_ms(&later.event).map_or(0.0, |milliseconds| f64::from(milliseconds) * 1e-3)
    }
}

/// One device's end of a communicator.
pub struct Communicator {
    gpu: Arc<Gpu>,
    stream: Arc<CudaStream>,
    rank: usize,
    ranks: usize,
    /// None once it has ended.
    handle: Mutex<Option<Handle>>,
}

#[derive(Clone, Copy)]
struct Handle(sys::ncclComm_t);

// SAFETY: NCCL lets any thread use a communicator, one at a time, which the mutex around it sees to.
unsafe impl Send for Handle {}

impl Communicator {
    /// Begins to form a communicator with the other ranks that have `id`, one device each. It may be used once
    /// [`Communicator::is_settled`] says so.
    ///
    /// # Errors
    /// One line if there is no NCCL, or if it refuses.
    pub fn begin(device: &CudaDevice, id: &[u8], rank: usize, ranks: usize) -> Result<Communicator, DeviceError> {
        check_present()?;
        let refused = |problem: String| DeviceError::Nccl(format!("rank {rank} of {ranks}: {problem}"));
        let mut unique = sys::ncclUniqueId { internal: [0; 128] };
        if id.len() != unique.internal.len() {
            return Err(refused(format!("an id of {} bytes", id.len())));
        }
        unique.internal.iter_mut().zip(id).for_each(|(to, from)| *to = *from as c_char);
        let gpu = device.shared.gpu.clone();
        let stream = gpu.urgent_stream().map_err(|error| refused(format!("no stream: {}", super::error::name_of(error))))?;
        let mut handle = std::ptr::null_mut();
        let mut config = non_blocking();
        // SAFETY: the context is bound by `urgent_stream`; both pointers are to values that outlive the call.
        unsafe { result::comm_init_rank_config(&mut handle, ranks as c_int, unique, rank as c_int, &mut config) }
            .map_err(|error| refused(name_of(&error)))?;
        Ok(Communicator { gpu, stream, rank, ranks, handle: Mutex::new(Some(Handle(handle))) })
    }

    /// Whether the call that was made last is under way, so that the next may be made.
    ///
    /// # Errors
    /// If it was ended, or if NCCL has noticed a failure, now or before: this is how one is found out.
    pub fn is_settled(&self) -> Result<bool, CommunicatorError> {
        let locked = self.locked();
        let Handle(handle) = locked.ok_or(CommunicatorError::Ended)?;
        let mut state = ncclResult_t::ncclSuccess;
        // SAFETY: the handle is alive as long as the lock is held.
        status(unsafe { sys::ncclCommGetAsyncError(handle, &mut state) })?;
        Ok(status(state)? != NcclStatus::InProgress)
    }

    /// Asks for these calls, of buffers that do not meet, as one group: NCCL joins them in as few launches as it can. Returns at once;
    /// nothing else may be asked until [`Communicator::is_settled`].
    ///
    /// The buffers must stay until the device's own stream has been told to wait for this one ([`Communicator::lead`]).
    pub fn submit(&self, requests: &[Request]) -> Result<(), CommunicatorError> {
        let locked = self.locked();
        let Handle(handle) = locked.ok_or(CommunicatorError::Ended)?;
        self.gpu.bound().map_err(|error| CommunicatorError::Failed(super::error::name_of(error)))?;
        failed(result::group_start())?;
        let asked = requests.iter().try_for_each(|request| self.ask(handle, request));
        // A group that was started is ended, whatever became of its calls.
        let ended = failed(result::group_end());
        asked.and(ended)
    }

    fn ask(&self, handle: sys::ncclComm_t, request: &Request) -> Result<(), CommunicatorError> {
        let Request { call, address, precision, share } = *request;
        let kind = match precision {
            Precision::Bf16 => sys::ncclDataType_t::ncclBfloat16,
            Precision::F32 => sys::ncclDataType_t::ncclFloat32,
        };
        let own = address + (self.rank * share * precision.bytes()) as Address;
        let (whole, own, stream) = (address as *mut _, own as *mut _, self.stream.cu_stream().cast());
        // SAFETY: `Request::new` has measured the buffer, whose owner keeps it; handle and stream are alive.
        let asked = unsafe {
            match call {
                SharedCall::AllGather => result::all_gather(own, whole, share, kind, handle, stream),
                SharedCall::ReduceScatter => {
                    result::reduce_scatter(whole, own, share, kind, sys::ncclRedOp_t::ncclSum, handle, stream)
                }
            }
        };
        failed(asked)
    }

    /// What is asked of this communicator from now on begins when everything asked of the device so far is done.
    pub fn follow(&self) {
        self.gpu.expect("ordering a communicator after the device", self.gpu.order(self.gpu.stream(), &self.stream));
    }

    /// What is asked of the device from now on begins when everything asked of this communicator so far is done.
    pub fn lead(&self) {
        self.gpu.expect("ordering the device after a communicator", self.gpu.order(&self.stream, self.gpu.stream()));
    }

    /// The same while the run unwinds, when a failure of the device is nothing new.
    pub fn lead_if_possible(&self) {
        let _ = self.gpu.order(&self.stream, self.gpu.stream());
    }

    /// A moment of this communicator.
    pub fn moment(&self) -> Moment {
        Moment { event: self.gpu.moment_in(&self.stream) }
    }

    /// A moment of the device's own stream.
    pub fn moment_of_device(&self) -> Moment {
        Moment { event: self.gpu.moment() }
    }

    /// Ends it whatever the other ranks do: what waits for them in its stream goes on, with numbers that mean nothing.
    pub fn abort(&self) {
        if let Some(Handle(handle)) = self.locked().take()
            && self.gpu.bound().is_ok()
        {
            // SAFETY: the handle was alive, and nobody can use it any more. There is nothing to be done about a failure.
            let _ = unsafe { result::comm_abort(handle) };
        }
    }

    /// Begins to end it as all ranks do; [`Communicator::is_settled`] says when all they asked for is done.
    pub fn finalize(&self) -> Result<(), CommunicatorError> {
        let locked = self.locked();
        let Handle(handle) = locked.ok_or(CommunicatorError::Ended)?;
        self.gpu.bound().map_err(|error| CommunicatorError::Failed(super::error::name_of(error)))?;
        // SAFETY: the handle is alive as long as the lock is held.
        failed(unsafe { result::comm_finalize(handle) })
    }

    /// The last call, after [`Communicator::finalize`] has settled.
    pub fn destroy(&self) {
        if let Some(Handle(handle)) = self.locked().take()
            && self.gpu.bound().is_ok()
        {
            // SAFETY: as for `abort`.
            let _ = unsafe { result::comm_destroy(handle) };
        }
    }

    pub fn rank(&self) -> usize {
        self.rank
    }
    pub fn ranks(&self) -> usize {
        self.ranks
    }

    fn locked(&self) -> MutexGuard<'_, Option<Handle>> {
        self.handle.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Communicator {
    fn drop(&mut self) {
        self.abort();
    }
}

/// Settings of which one is set: calls return at once.
fn non_blocking() -> sys::ncclConfig_t {
    sys::ncclConfig_t {
        size: size_of::<sys::ncclConfig_t>(),
        magic: CONFIG_MAGIC,
        version: CONFIG_VERSION,
        blocking: 0,
        cgaClusterSize: UNDEFINED,
        minCTAs: UNDEFINED,
        maxCTAs: UNDEFINED,
        netName: std::ptr::null(),
        splitShare: UNDEFINED,
        trafficClass: UNDEFINED,
        commName: std::ptr::null(),
        collnetEnable: UNDEFINED,
        CTAPolicy: UNDEFINED,
        shrinkShare: UNDEFINED,
        nvlsCTAs: UNDEFINED,
        nChannelsPerNetPeer: UNDEFINED,
        nvlinkCentricSched: UNDEFINED,
        graphUsageMode: UNDEFINED,
        numRmaCtx: UNDEFINED,
        maxP2pPeers: UNDEFINED,
    }
}

fn status(result: ncclResult_t) -> Result<NcclStatus, CommunicatorError> {
    result.result().map_err(|error| CommunicatorError::Failed(name_of(&error)))
}

/// In progress is as good as done: who asked polls.
fn failed(result: Result<NcclStatus, NcclError>) -> Result<(), CommunicatorError> {
    result.map(|_| ()).map_err(|error| CommunicatorError::Failed(name_of(&error)))
}
