//! Collectives over the buffers of any device, by way of the host: read, exchange between the hosts, write.

use std::sync::Arc;

use half::bf16;

use super::links::Links;
use super::ranks::{Host, Ranks};
use crate::collectives::{CollectiveError, Collectives, HostCollectives, Number, Reduction, Traffic, Transport};
use crate::device::Device;

/// Numbers travel as precisely as the device keeps them: f32, or bf16.
struct HostLinks<D: Device, T: Transport> {
    device: D,
    collectives: HostCollectives<T>,
}

impl<D: Device, T: Transport + 'static> HostLinks<D, T> {
    fn gather<N: Number<Accumulator = f32>>(&self, buffer: &mut D::Buffer, share: usize) -> Result<(), CollectiveError> {
        let (rank, ranks) = (self.rank(), self.ranks());
        let own: Vec<N> = self.device.read(buffer, rank * share, share).into_iter().map(N::narrow).collect();
        let mut all = vec![N::default(); ranks * share];
        self.collectives.all_gather(&own, &mut all, &vec![share; ranks])?;
        let all: Vec<f32> = all.into_iter().map(N::widen).collect();
        self.device.write(buffer, 0, &all);
        Ok(())
    }

    fn scatter<N: Number<Accumulator = f32>>(&self, buffer: &mut D::Buffer, share: usize) -> Result<(), CollectiveError> {
        let (rank, ranks) = (self.rank(), self.ranks());
        let all: Vec<N> = self.device.read(buffer, 0, ranks * share).into_iter().map(N::narrow).collect();
        let mut own = vec![N::default(); share];
        self.collectives.reduce_scatter(&all, &mut own, &vec![share; ranks], Reduction::Sum)?;
        let own: Vec<f32> = own.into_iter().map(N::widen).collect();
        self.device.write(buffer, rank * share, &own);
        Ok(())
    }
}

/// Links between all of `ranks`, who make no other calls of this group from now on.
pub(super) fn host_links<D: Device>(device: &D, ranks: Ranks) -> Arc<dyn Links<D>> {
    let device = device.clone();
    match ranks.host {
        Host::Local(collectives) => Arc::new(HostLinks { device, collectives }),
        Host::Tcp(collectives) => Arc::new(HostLinks { device, collectives }),
    }
}

impl<D: Device, T: Transport + 'static> Links<D> for HostLinks<D, T> {
    fn rank(&self) -> usize {
        self.collectives.rank()
    }

    fn ranks(&self) -> usize {
        self.collectives.world_size()
    }

    fn all_gather(&self, buffer: &mut D::Buffer, share: usize) -> Result<(), CollectiveError> {
        match self.device.number_bytes(buffer) {
            2 => self.gather::<bf16>(buffer, share),
            _ => self.gather::<f32>(buffer, share),
        }
    }

    fn reduce_scatter(&self, buffer: &mut D::Buffer, share: usize) -> Result<(), CollectiveError> {
        match self.device.number_bytes(buffer) {
            2 => self.scatter::<bf16>(buffer, share),
            _ => self.scatter::<f32>(buffer, share),
        }
    }

    fn overlapped(
        &self,
        communicate: &mut (dyn FnMut(&dyn Links<D>) -> Result<(), CollectiveError> + Send),
        compute: &mut dyn FnMut(),
    ) -> Result<(), CollectiveError> {
        let device = self.device.clone();
        let communicate = |collectives: &HostCollectives<T>| communicate(&HostLinks { device, collectives: collectives.clone() });
        self.collectives.overlapped(communicate, compute).0
    }

    fn traffic(&self) -> Traffic {
        self.collectives.traffic()
    }
}
