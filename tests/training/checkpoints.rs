//! Checkpoints that several ranks write together and any number of ranks reads.

use std::path::Path;

use learner::device::CpuDevice;
use learner::model::Model;
use learner::parallel::{ShardedModel, World};
use learner::train::{CheckpointWriter, Checkpoints, Policy, Trainer};

use crate::support::{Tensors, largest_difference, on_ranks, optimizer, samples, settings, tensors, trainer};

const LENGTHS: [usize; 5] = [30, 12, 55, 9, 21];

fn steps(trainer: &mut Trainer<CpuDevice>, range: std::ops::Range<u64>) {
    for seed in range {
        trainer.imitation_step(&samples(&LENGTHS, seed), 1e-3, &settings(64)).expect("all ranks are there");
    }
}

fn save(trainer: &mut Trainer<CpuDevice>, writer: &mut CheckpointWriter, step: usize) {
    let snapshot = || Ok(trainer.snapshot()?);
    writer.save(step, snapshot, b"{}", &step).expect("the one before is written");
}

/// Takes three steps on `ranks` ranks and saves; returns the weights.
fn write(folder: &Path, ranks: usize) -> Tensors {
    on_ranks(ranks, 1, |world| {
        let ranks = world.ranks.clone();
        let mut trainer = trainer(world, &settings(64));
        steps(&mut trainer, 0..3);
        let mut writer = CheckpointWriter::open(folder.to_path_buf(), 2, &ranks).expect("a folder");
        save(&mut trainer, &mut writer, 3);
        let tensors = tensors(&mut trainer);
        writer.wait().expect("written");
        tensors
    })
    .remove(0)
}

fn load(world: World<CpuDevice>, folder: &Path) -> Trainer<CpuDevice> {
    let (path, step) = Checkpoints::new(folder.to_path_buf(), 2).latest().expect("a folder").expect("a checkpoint");
    assert_eq!(Checkpoints::load_state::<usize>(&path).expect("a state"), step);
    let policy = match world.ranks.ranks() {
        1 => Policy::whole(Model::load(CpuDevice::new(), &path).expect("weights")),
        _ => Policy::sharded(ShardedModel::load(CpuDevice::new(), &path, &world).expect("weights")),
    };
    let mut trainer = Trainer::new(policy, world, optimizer(), &settings(64));
    trainer.restore_optimizer(&path).expect("moments");
    trainer
}

#[test]
fn what_some_ranks_wrote_any_number_of_ranks_reads_and_goes_on() {
    let straight = on_ranks(1, 1, |world| {
        let mut trainer = trainer(world, &settings(64));
        steps(&mut trainer, 0..6);
        tensors(&mut trainer)
    })
    .remove(0);
    for writers in [1, 2, 4] {
        let folder = tempfile::tempdir().unwrap();
        let written = write(folder.path(), writers);
        let place = folder.path().join("step-00000003");
        assert_eq!(place.join("model.safetensors").exists(), writers == 1, "one writer needs no index");
        for readers in [1, 3, 4] {
            let read = on_ranks(readers, 1, |world| {
                let mut trainer = load(world, folder.path());
                let loaded = tensors(&mut trainer);
                steps(&mut trainer, 3..6);
                (loaded, tensors(&mut trainer))
            });
            for (loaded, after) in read {
                assert_eq!(loaded, written, "written by {writers}, read by {readers}");
                let difference = largest_difference(&after, &straight);
                assert!(difference <= 1e-4, "written by {writers}, read by {readers}: {difference}");
            }
        }
    }
}

#[test]
fn resuming_on_as_many_ranks_gives_the_same_bits() {
    for ranks in [1, 3] {
        let folder = tempfile::tempdir().unwrap();
        let straight = on_ranks(ranks, 1, |world| {
            let mut trainer = trainer(world, &settings(64));
            steps(&mut trainer, 0..6);
            tensors(&mut trainer)
        });
        write(folder.path(), ranks);
        let resumed = on_ranks(ranks, 1, |world| {
            let mut trainer = load(world, folder.path());
            steps(&mut trainer, 3..6);
            tensors(&mut trainer)
        });
        assert_eq!(resumed, straight, "{ranks} ranks");
    }
}

/// The state is that of the snapshot, however long its writing takes, and at no moment is there less than the checkpoint before.
#[test]
fn training_goes_on_while_a_checkpoint_is_written() {
    let folder = tempfile::tempdir().unwrap();
    let at_four = on_ranks(3, 1, |world| {
        let ranks = world.ranks.clone();
        let mut trainer = trainer(world, &settings(64));
        let mut writer = CheckpointWriter::open(folder.path().to_path_buf(), 2, &ranks).expect("a folder");
        steps(&mut trainer, 0..2);
        save(&mut trainer, &mut writer, 2);
        steps(&mut trainer, 2..4);
        let at_four = tensors(&mut trainer);
        save(&mut trainer, &mut writer, 4);
        let latest = || Checkpoints::new(folder.path().to_path_buf(), 2).latest().expect("a folder").map(|(_, step)| step);
        assert!(latest() >= Some(2), "saving waits for the one before");
        steps(&mut trainer, 4..5);
        let mut rounds = 0;
        while latest() < Some(4) || rounds == 0 {
            writer.mark_if_written().expect("all ranks are there");
            // All ranks come to the same end, for they see the folder at the same moment.
            ranks.barrier().expect("all ranks are there");
            rounds += 1;
        }
        at_four
    });
    let found = on_ranks(1, 1, |world| tensors(&mut load(world, folder.path())));
    assert_eq!(found[0], at_four[0]);
}

#[test]
fn a_rank_that_cannot_write_says_which_file_and_the_older_checkpoint_stays() {
    let folder = tempfile::tempdir().unwrap();
    let errors = on_ranks(2, 1, |world| {
        let ranks = world.ranks.clone();
        let mut trainer = trainer(world, &settings(64));
        let mut writer = CheckpointWriter::open(folder.path().to_path_buf(), 2, &ranks).expect("a folder");
        steps(&mut trainer, 0..1);
        save(&mut trainer, &mut writer, 1);
        writer.wait().expect("written");
        // Something is in the way of rank 1's file.
        let obstacle = folder.path().join("step-00000002.partial/optimizer-00002-of-00002.safetensors");
        std::fs::create_dir_all(&obstacle).expect("a folder");
        steps(&mut trainer, 1..2);
        save(&mut trainer, &mut writer, 2);
        let error = writer.wait().map_err(|error| error.to_string());
        if let Err(reason) = &error {
            ranks.abort(reason);
        }
        error.expect_err("the checkpoint cannot be whole")
    });
    for error in &errors {
        assert!(error.contains("optimizer-00002-of-00002.safetensors"), "{error}");
    }
    assert!(errors[0].contains("rank 1"), "{errors:?}");
    let latest = Checkpoints::new(folder.path().to_path_buf(), 2).latest().expect("a folder");
    assert_eq!(latest.map(|(_, step)| step), Some(1));
    let found = on_ranks(1, 1, |world| load(world, folder.path()).policy().parameter_count());
    assert!(found[0] > 0);
}

#[test]
fn damaged_moments_are_refused_by_name() {
    let folder = tempfile::tempdir().unwrap();
    write(folder.path(), 2);
    let place = folder.path().join("step-00000003");
    let file = place.join("optimizer-00002-of-00002.safetensors");
    let whole = std::fs::read(&file).unwrap();
    let refusal = |content: Option<&[u8]>| {
        match content {
            Some(content) => std::fs::write(&file, content).unwrap(),
            None => std::fs::remove_file(&file).unwrap(),
        }
        on_ranks(1, 1, |world| trainer(world, &settings(64)).restore_optimizer(&place).unwrap_err().to_string()).remove(0)
    };
    for content in
        [None, Some(&whole[..5]), Some(&whole[..whole.len() / 3]), Some(&whole[..whole.len() - 1]), Some(&[255; 400][..])]
    {
        let error = refusal(content);
        assert!(error.contains("optimizer-00002-of-00002.safetensors") && !error.contains('\n'), "{error}");
    }
    std::fs::write(&file, &whole).unwrap();
    on_ranks(1, 1, |world| trainer(world, &settings(64)).restore_optimizer(&place).expect("whole again"));
}

/// A folder stands where the moments are to be written, after the weights have been.
#[test]
fn a_rank_that_cannot_write_its_part_leaves_no_large_file_and_no_checkpoint() {
    let folder = tempfile::tempdir().expect("a folder");
    let partial = folder.path().join("step-00000003.partial");
    let obstacle = partial.join("optimizer-00001-of-00001.safetensors");
    on_ranks(1, 1, |world| {
        let ranks = world.ranks.clone();
        let mut trainer = trainer(world, &settings(64));
        let mut writer = CheckpointWriter::open(folder.path().to_path_buf(), 2, &ranks).expect("a folder");
        std::fs::create_dir_all(&obstacle).expect("an obstacle");
        save(&mut trainer, &mut writer, 3);
        let problem = writer.wait().expect_err("it cannot be written").to_string();
        assert!(problem.contains("optimizer-00001-of-00001.safetensors"), "{problem}");
        writer.wait().expect("nothing is waited for any more");
    });
    let left: Vec<_> = std::fs::read_dir(&partial).expect("the folder").map(|entry| entry.expect("an entry").path()).collect();
    assert_eq!(left, [obstacle]);
    assert_eq!(Checkpoints::new(folder.path().to_path_buf(), 2).latest().expect("a folder"), None);
}
