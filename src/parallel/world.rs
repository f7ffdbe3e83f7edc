//! All that a rank needs of the others: what they say on the host, where each stands, and the links over which buffers travel.

use std::sync::Arc;

use super::host_links::host_links;
use super::links::Links;
use super::mesh::Mesh;
use super::nccl::NcclLinks;
use super::ranks::Ranks;
use crate::collectives::{CollectiveError, Failure, Liveness};
use crate::device::{CudaDevice, Device};

/// One rank's place in a run of many. Clones are the same place.
pub struct World<D: Device> {
    pub ranks: Ranks,
    pub mesh: Mesh,
    /// Of all ranks: weights and gradients.
    pub world: Arc<dyn Links<D>>,
    /// Of the ranks that share this rank's sequences: keys, values, queries and scores.
    pub context: Arc<dyn Links<D>>,
}

impl<D: Device> World<D> {
    /// Links over the host, for any device: buffers are read, exchanged between the hosts, and written, as numbers. So ranks whose
    /// activations are bf16 must not share sequences over them (see [`SharedQueries`](crate::device::SharedQueries)). All ranks make
    /// this call.
    ///
    /// # Errors
    /// A mesh of another number of ranks; a rank that is lost.
    pub fn over_hosts(device: &D, ranks: Ranks, mesh: Mesh) -> Result<World<D>, CollectiveError> {
        let (world, context) = groups(&ranks, mesh)?;
        Ok(World { world: host_links(device, world), context: host_links(device, context), ranks, mesh })
    }
}

impl World<CudaDevice> {
    /// Links over NCCL. All ranks make this call, and drop what it gives together. `liveness` is that of
    /// the host side: how soon it knows which rank is lost, and how long a rank may be waited for before it is taken for hung.
    ///
    /// # Errors
    /// As [`World::over_hosts`]; no NCCL here.
    pub fn over_nccl(
        device: &CudaDevice,
        ranks: Ranks,
        mesh: Mesh,
        liveness: &Liveness,
    ) -> Result<World<CudaDevice>, CollectiveError> {
        let (world, context) = groups(&ranks, mesh)?;
        let world = Arc::new(NcclLinks::new(device, world, liveness)?);
        let context = Arc::new(NcclLinks::new(device, context, liveness)?);
        Ok(World { ranks, mesh, world, context })
    }
}

/// All ranks, and those that share this rank's sequences, as groups of their own.
fn groups(ranks: &Ranks, mesh: Mesh) -> Result<(Ranks, Ranks), CollectiveError> {
    if mesh.world() != ranks.ranks() {
        let reason = format!("a mesh of {} ranks for a run of {}", mesh.world(), ranks.ranks());
        return Err(ranks.error(ranks.rank(), Failure::Misuse, reason));
    }
    Ok((ranks.split(0)?, ranks.split(mesh.coordinates(ranks.rank()).data)?))
}

impl<D: Device> Clone for World<D> {
    fn clone(&self) -> World<D> {
        World { ranks: self.ranks.clone(), mesh: self.mesh, world: self.world.clone(), context: self.context.clone() }
    }
}
