//! The ranks of a run as a grid: data parallel x context parallel.
//!
//! The context ranks of one replica are numbered consecutively, so that they share a node as far as they can: what they exchange
//! in every layer then stays on the fastest links.

use std::ops::Range;

/// Why ranks cannot be laid out as asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MeshError {
    #[error("{0} nodes of {1} ranks: both must be at least 1, and their product a number of ranks below 65536")]
    Size(usize, usize),
    #[error("a context-parallel degree of {context} does not divide the {world} ranks")]
    ContextDegree { context: usize, world: usize },
    #[error("{context} ranks of a context group would lie unevenly on nodes of {ranks_per_node}")]
    Uneven { context: usize, ranks_per_node: usize },
}

/// Where a rank stands in the grid.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Coordinates {
    /// Which replica, in `0..data`.
    pub data: usize,
    /// Which part of that replica's sequences, in `0..context`.
    pub context: usize,
}

/// How the ranks of a group lie on nodes: the same number on each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Placement {
    pub nodes: usize,
    pub ranks_per_node: usize,
}

impl Placement {
    pub fn ranks(self) -> usize {
        self.nodes * self.ranks_per_node
    }
}

/// All ranks of a run: `world = data x context`, on nodes of `ranks_per_node` consecutive ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mesh {
    data: usize,
    context: usize,
    nodes: usize,
    ranks_per_node: usize,
}

/// More ranks than anybody has; it keeps every product of counts and bytes far from overflow.
const MOST_RANKS: usize = 1 << 16;

impl Mesh {
    /// `nodes x ranks_per_node` ranks, `context` of which share each sequence.
    ///
    /// # Errors
    /// No ranks or too many; a degree that does not divide them; a context group that neither fits into one node evenly nor fills
    /// whole nodes.
    pub fn new(nodes: usize, ranks_per_node: usize, context: usize) -> Result<Mesh, MeshError> {
        let world = nodes.checked_mul(ranks_per_node).filter(|world| (1..MOST_RANKS).contains(world));
        let world = world.ok_or(MeshError::Size(nodes, ranks_per_node))?;
        if context == 0 || !world.is_multiple_of(context) {
            return Err(MeshError::ContextDegree { context, world });
        }
        if !ranks_per_node.is_multiple_of(context) && !context.is_multiple_of(ranks_per_node) {
            return Err(MeshError::Uneven { context, ranks_per_node });
        }
        Ok(Mesh { data: world / context, context, nodes, ranks_per_node })
    }

    /// Replicas of the model's sequences: each works on sequences of its own.
    pub fn data(&self) -> usize {
        self.data
    }

    /// Ranks that share each sequence.
    pub fn context(&self) -> usize {
        self.context
    }

    pub fn world(&self) -> usize {
        self.data * self.context
    }

    /// Of `rank`, below [`Mesh::world`].
    pub fn coordinates(&self, rank: usize) -> Coordinates {
        Coordinates { data: rank / self.context, context: rank % self.context }
    }

    pub fn rank(&self, at: Coordinates) -> usize {
        at.data * self.context + at.context
    }

    pub fn node(&self, rank: usize) -> usize {
        rank / self.ranks_per_node
    }

    /// The ranks that share `rank`'s sequences, `rank` among them.
    pub fn context_group(&self, rank: usize) -> Range<usize> {
        let first = rank - rank % self.context;
        first..first + self.context
    }

    /// The ranks that hold the same part of other sequences, `rank` among them, ascending.
    pub fn data_group(&self, rank: usize) -> impl Iterator<Item = usize> + use<> {
        (rank % self.context..self.world()).step_by(self.context)
    }

    pub fn world_placement(&self) -> Placement {
        Placement { nodes: self.nodes, ranks_per_node: self.ranks_per_node }
    }

    /// Of every context group.
    pub fn context_placement(&self) -> Placement {
        let ranks_per_node = self.context.min(self.ranks_per_node);
        Placement { nodes: self.context / ranks_per_node, ranks_per_node }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn two_nodes_of_four_with_degree_two() {
        let mesh = Mesh::new(2, 4, 2).expect("a mesh");
        assert_eq!((mesh.data(), mesh.context(), mesh.world()), (4, 2, 8));
        assert_eq!(mesh.coordinates(5), Coordinates { data: 2, context: 1 });
        assert_eq!(mesh.context_group(5), 4..6);
        assert_eq!(mesh.data_group(5).collect::<Vec<_>>(), [1, 3, 5, 7]);
        assert_eq!(mesh.context_placement(), Placement { nodes: 1, ranks_per_node: 2 });
    }

    #[test]
    fn a_degree_beyond_a_node_fills_whole_nodes() {
        let mesh = Mesh::new(16, 8, 16).expect("a mesh");
        assert_eq!(mesh.context_placement(), Placement { nodes: 2, ranks_per_node: 8 });
        assert_eq!(mesh.world_placement().ranks(), 128);
    }

    #[test]
    fn what_has_no_even_layout_is_refused() {
        assert_eq!(Mesh::new(0, 8, 1), Err(MeshError::Size(0, 8)));
        assert_eq!(Mesh::new(usize::MAX, 2, 1), Err(MeshError::Size(usize::MAX, 2)));
        assert_eq!(Mesh::new(2, 8, 0), Err(MeshError::ContextDegree { context: 0, world: 16 }));
        assert_eq!(Mesh::new(2, 8, 3), Err(MeshError::ContextDegree { context: 3, world: 16 }));
        assert_eq!(Mesh::new(3, 8, 12), Err(MeshError::Uneven { context: 12, ranks_per_node: 8 }));
    }

    proptest! {
        /// Ranks and coordinates are one another's inverse, and every rank is in exactly one group of each kind.
        #[test]
        fn groups_partition_the_ranks(nodes in 1usize..6, per_node in 1usize..9, context in 1usize..48) {
            let Ok(mesh) = Mesh::new(nodes, per_node, context) else { return Ok(()) };
            for rank in 0..mesh.world() {
                let at = mesh.coordinates(rank);
                prop_assert_eq!(mesh.rank(at), rank);
                prop_assert!(at.data < mesh.data() && at.context < mesh.context());
                for other in 0..mesh.world() {
                    let there = mesh.coordinates(other);
                    prop_assert_eq!(mesh.context_group(rank).contains(&other), there.data == at.data);
                    prop_assert_eq!(mesh.data_group(rank).any(|member| member == other), there.context == at.context);
                }
                let mut nodes: Vec<usize> = mesh.context_group(rank).map(|member| mesh.node(member)).collect();
                nodes.dedup();
                prop_assert_eq!(nodes.len(), mesh.context_placement().nodes);
            }
        }
    }
}
