//! What the trainer eats: sequences with a weight on each trained token, packed end to end without padding.

use super::Transcript;

/// One training sequence.
#[derive(Clone, Debug, PartialEq)]
pub struct Sample {
    /// `[tokens]`
    pub ids: Vec<u32>,
    /// `[tokens]` true where the token is predicted and trained on. Position 0 has no prefix and is never trained.
    pub trained: Vec<bool>,
    /// `[tokens]` log-probabilities at sampling time; all 0 for demonstrations.
    pub sampled_log_probs: Vec<f32>,
    /// Advantage of every trained token of the sequence; 1 for demonstrations.
    pub advantage: f32,
}

impl Sample {
    /// An episode as a training sample, cut after its last sampled token: what follows predicts nothing.
    pub fn of(transcript: &Transcript, advantage: f32) -> Sample {
        let length = transcript.sampled.iter().rposition(|&sampled| sampled).map_or(0, |last| last + 1);
        Sample {
            ids: transcript.ids[..length].to_vec(),
            trained: transcript.sampled[..length].to_vec(),
            sampled_log_probs: transcript.log_probs[..length].to_vec(),
            advantage,
        }
    }

    pub fn trained_count(&self) -> usize {
        self.trained.iter().skip(1).filter(|&&trained| trained).count()
    }
}

/// Sequences packed end to end: `ids[starts[i]..starts[i + 1]]` is sequence `i`; no attention crosses a start.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Batch {
    /// `[tokens]`
    pub ids: Vec<u32>,
    /// `[sequences + 1]` offsets into `ids`, the first 0, the last `ids.len()`.
    pub starts: Vec<usize>,
    /// Rows of `ids` whose NEXT token is scored: row `r` scores `ids[r + 1]`. Ascending; never the last row of a sequence.
    pub scored_rows: Vec<usize>,
}

impl Batch {
    /// Packs `sequences`, scoring each token `t >= 1` of a sequence for which `scored(sequence, t)` holds.
    pub fn pack(sequences: &[&[u32]], scored: impl Fn(usize, usize) -> bool) -> Batch {
        let mut batch = Batch { starts: vec![0], ..Batch::default() };
        for (index, ids) in sequences.iter().enumerate() {
            let start = batch.ids.len();
            batch.ids.extend_from_slice(ids);
            batch.starts.push(batch.ids.len());
            batch.scored_rows.extend((1..ids.len()).filter(|&token| scored(index, token)).map(|token| start + token - 1));
        }
        batch
    }

    pub fn sequences(&self) -> usize {
        self.starts.len().saturating_sub(1)
    }

    /// `[sequences]` tokens of each.
    pub fn lengths(&self) -> impl Iterator<Item = usize> + '_ {
        self.starts.windows(2).map(|bounds| bounds[1] - bounds[0])
    }

    /// `[scored_rows]` the token each scored row predicts.
    pub fn targets(&self) -> Vec<u32> {
        self.scored_rows.iter().map(|&row| self.ids[row + 1]).collect()
    }
}
