//! All that a rank needs of the others: what they say on the host, where each stands, and the links over which buffers travel.

use std::sync::Arc;

use super::host_links::host_links;
use super::links::Links;
use super::mesh::Mesh;
use super::ranks::Ranks;
use crate::collectives::{CollectiveError, Failure};
use crate::device::Device;

/// One rank's place in a run of many. Clones are the same place.
pub struct World<D: Device> {
    pub ranks: Ranks,
    pub mesh: Mesh,
    /// Of all ranks: weights and gradients.
    pub world: Arc<dyn Links<D>>,
    /// Of the ranks that share this rank's sequences: keys, values and scores.
    pub context: Arc<dyn Links<D>>,
}

impl<D: Device> World<D> {
    /// Links over the host, for any device: buffers are read, exchanged between the hosts, and written. All ranks make this call.
    ///
    /// # Errors
    /// A mesh of another number of ranks; a rank that is lost.
    pub fn over_hosts(device: &D, ranks: Ranks, mesh: Mesh) -> Result<World<D>, CollectiveError> {
        if mesh.world() != ranks.ranks() {
            let reason = format!("a mesh of {} ranks for a run of {}", mesh.world(), ranks.ranks());
            return Err(ranks.error(ranks.rank(), Failure::Misuse, reason));
        }
        let group = mesh.coordinates(ranks.rank()).data;
        let world = host_links(device, ranks.split(0)?);
        let context = host_links(device, ranks.split(group)?);
        Ok(World { ranks, mesh, world, context })
    }
}

impl<D: Device> Clone for World<D> {
    fn clone(&self) -> World<D> {
        World { ranks: self.ranks.clone(), mesh: self.mesh, world: self.world.clone(), context: self.context.clone() }
    }
}
