//! What the ranks that share sequences exchange within a pass: keys, values, queries and scores.

use super::links::Links;
use super::sharded_parameters::or_unwind;
use crate::device::{Cotangents, Device, Role, Scores};
use crate::model::{ModelConfig, SequenceExchange};

/// The most groups of heads: the more, the less of an exchange has nothing to run beside; the fewer, the longer each message.
const MOST_HEAD_GROUPS: usize = 4;

/// Into how many groups of heads a model's exchange is cut between so many ranks.
pub fn head_groups(config: &ModelConfig, context_ranks: usize) -> usize {
    if context_ranks == 1 { 1 } else { config.key_value_heads.min(MOST_HEAD_GROUPS) }
}

/// Of one pass.
pub(super) struct ContextExchange<'a, D: Device> {
    pub links: &'a dyn Links<D>,
    pub head_groups: usize,
}

impl<D: Device> SequenceExchange<D> for ContextExchange<'_, D> {
    fn ranks(&self) -> usize {
        self.links.ranks()
    }

    fn head_groups(&self) -> usize {
        self.head_groups
    }

    fn gather(&mut self, buffer: &mut D::Buffer, share: usize, meanwhile: &mut dyn FnMut()) {
        if share == 0 {
            return meanwhile();
        }
        or_unwind(self.links.overlapped(&mut |links| links.all_gather(buffer, share), meanwhile));
    }
}

/// Numbers that each rank contributes when scores are gathered: two for every token, whether it is scored or not, so that the plan knows
/// them without the labels.
pub(super) fn score_share(most_tokens: usize) -> usize {
    2 * most_tokens
}

/// The scores of a whole batch from those of each rank's rows: `own` is this rank's, `places` says by rank where each belongs,
/// `most_tokens` is what the rank with most tokens has.
///
/// Unwinds if a rank is lost.
pub(super) fn gather_scores<D: Device>(
    device: &D,
    links: &dyn Links<D>,
    own: &Scores,
    places: &[Vec<usize>],
    most_tokens: usize,
) -> Scores {
    if places.len() == 1 {
        return own.clone();
    }
    let share = score_share(most_tokens);
    let mut values = own.log_probs.clone();
    values.resize(most_tokens, 0.0);
    values.extend_from_slice(&own.entropies);
    let mut gathered = device.zeros(Role::Statistics, share * places.len());
    device.write(&mut gathered, links.rank() * share, &values);
    if share > 0 {
        or_unwind(links.all_gather(&mut gathered, share));
    }
    let values = device.read(&gathered, 0, share * places.len());
    let scored = places.iter().map(Vec::len).sum();
    let mut scores = Scores { log_probs: vec![0.0; scored], entropies: vec![0.0; scored] };
    for (rank, places) in places.iter().enumerate() {
        let (log_probs, entropies) = values[rank * share..][..share].split_at(most_tokens);
        for (row, &place) in places.iter().enumerate() {
            scores.log_probs[place] = log_probs[row];
            scores.entropies[place] = entropies[row];
        }
    }
    scores
}

/// Of the cotangents of a whole batch's scores, those at `places`.
pub(super) fn own_cotangents(whole: &Cotangents, places: &[usize]) -> Cotangents {
    let own = |values: &Vec<f32>| places.iter().map(|&place| values[place]).collect();
    Cotangents { log_probs: own(&whole.log_probs), entropies: whole.entropies.as_ref().map(own) }
}
