//! Checkpoints that several ranks write together and any number of ranks reads.

use std::path::Path;

use learner::device::CpuDevice;
use learner::parallel::{Ranks, World};
use learner::train::{CheckpointWriter, Checkpoints, StepSettings, Trainer};
use learner::types::{Phase, Progress, Silent};

use crate::support::{self, Tensors, largest_difference, on_ranks, optimizer, samples, settings, tensors, trainer};

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

fn open<'a>(folder: &Path, ranks: &Ranks) -> CheckpointWriter<'a> {
    CheckpointWriter::open(folder.to_path_buf(), 2, ranks, &Silent).expect("a folder")
}

fn latest(folder: &Path) -> Option<usize> {
    Checkpoints::new(folder.to_path_buf(), 2).latest().expect("a folder").map(|(_, step)| step)
}

/// Takes three steps on `ranks` ranks and saves; returns the weights.
fn write(folder: &Path, ranks: usize) -> Tensors {
    on_ranks(ranks, 1, |world| {
        let ranks = world.ranks.clone();
        let mut trainer = trainer(world, &settings(64));
        steps(&mut trainer, 0..3);
        let mut writer = open(folder, &ranks);
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
    let mut trainer = Trainer::new(support::load(&world, &path), world, optimizer(), &settings(64));
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
        let mut writer = open(folder.path(), &ranks);
        steps(&mut trainer, 0..2);
        save(&mut trainer, &mut writer, 2);
        steps(&mut trainer, 2..4);
        let at_four = tensors(&mut trainer);
        save(&mut trainer, &mut writer, 4);
        assert!(latest(folder.path()) >= Some(2), "saving waits for the one before");
        steps(&mut trainer, 4..5);
        // It counts once it is written, whatever training is at: nothing is asked of the writer any more.
        while latest(folder.path()) < Some(4) {
            std::thread::sleep(std::time::Duration::from_millis(1));
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
        let mut writer = open(folder.path(), &ranks);
        steps(&mut trainer, 0..1);
        save(&mut trainer, &mut writer, 1);
        writer.wait().expect("written");
        // Something is in the way of rank 1's file.
        let obstacle = writer.partial(2).join("optimizer-00002-of-00002.safetensors");
        std::fs::create_dir_all(&obstacle).expect("a folder");
        steps(&mut trainer, 1..2);
        save(&mut trainer, &mut writer, 2);
        writer.wait().expect_err("the checkpoint cannot be whole").to_string()
    });
    for error in &errors {
        assert!(error.contains("optimizer-00002-of-00002.safetensors"), "{error}");
    }
    assert!(errors[0].contains("rank 1"), "{errors:?}");
    assert_eq!(latest(folder.path()), Some(1));
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

/// Remembers what it is warned of.
#[derive(Default)]
struct Warnings(std::sync::Mutex<Vec<String>>);

impl Progress for Warnings {
    fn header(&self, _: &str, _: &[(String, String)]) {}
    fn phase(&self, name: &str, total: Option<u64>) -> Box<dyn Phase> {
        Silent.phase(name, total)
    }
    fn line(&self, _: &str) {}
    fn detail(&self, _: &str) {}
    fn note(&self, _: &str) {}
    fn warn(&self, text: &str) {
        self.0.lock().expect("no test panics here").push(text.to_owned());
    }
    fn table(&self, _: &str, _: &[&str], _: &[Vec<String>]) {}
    fn curve(&self, _: &str, _: &str, _: &[(f64, f64)], _: &[(f64, f64)]) {}
}

#[test]
fn an_old_checkpoint_that_cannot_be_removed_is_a_warning_and_tried_again() {
    let folder = tempfile::tempdir().unwrap();
    let warnings = Warnings::default();
    let said = || std::mem::take(&mut *warnings.0.lock().expect("no test panics here"));
    on_ranks(1, 1, |world| {
        let ranks = world.ranks.clone();
        let mut trainer = trainer(world, &settings(64));
        let mut writer = CheckpointWriter::open(folder.path().to_path_buf(), 1, &ranks, &warnings).expect("a folder");
        save(&mut trainer, &mut writer, 1);
        writer.wait().expect("written");
        // No file, so it cannot be removed as one.
        let mark = folder.path().join("step-00000001/DONE");
        std::fs::remove_file(&mark).expect("a mark");
        std::fs::create_dir(&mark).expect("a folder in its place");
        save(&mut trainer, &mut writer, 2);
        writer.wait().expect("written");
        let warned = said();
        assert!(warned.len() == 1 && warned[0].contains("step-00000001"), "{warned:?}");
        std::fs::remove_dir(&mark).expect("an empty folder");
        save(&mut trainer, &mut writer, 3);
        writer.wait().expect("written");
    });
    assert_eq!(said(), Vec::<String>::new());
    let left: Vec<_> = folder.path().read_dir().unwrap().flatten().map(|entry| entry.file_name()).collect();
    assert_eq!(left, ["step-00000003"]);
}

/// A start of a larger world that was frozen and taken for dead goes on writing while the next start is at work.
#[test]
fn two_starts_of_a_run_share_no_file() {
    let folder = tempfile::tempdir().unwrap();
    let save_on = |world: World<CpuDevice>| {
        let ranks = world.ranks.clone();
        let mut trainer = trainer(world, &settings(64));
        steps(&mut trainer, 0..1);
        let mut writer = open(folder.path(), &ranks);
        let partial = writer.partial(1);
        save(&mut trainer, &mut writer, 1);
        writer.wait().expect("a checkpoint that an earlier start has made ends no run");
        (partial, tensors(&mut trainer))
    };
    let frozen = on_ranks(4, 1, save_on);
    let later = on_ranks(2, 1, save_on);
    assert!(frozen.iter().all(|(partial, _)| partial == &frozen[0].0));
    assert_ne!(frozen[0].0, later[0].0);
    let place = folder.path().join("step-00000001");
    let found = on_ranks(1, 1, |world| tensors(&mut load(world, folder.path()))).remove(0);
    assert_eq!(found, frozen[0].1, "the first one stays");
    assert!(folder.path().read_dir().unwrap().flatten().all(|entry| entry.path() == place), "and nothing of the other");

    std::fs::copy(place.join("optimizer-00001-of-00004.safetensors"), place.join("optimizer-00001-of-00002.safetensors"))
        .unwrap();
    let refuse = |world| trainer(world, &settings(64)).restore_optimizer(&place).unwrap_err().to_string();
    let error = on_ranks(1, 1, refuse).remove(0);
    assert!(error.contains("optimizer-00001-of-00002.safetensors") && error.contains("4 ranks"), "{error}");
}

#[test]
fn an_optimizer_that_is_reset_is_a_new_one() {
    let reset = |world: World<CpuDevice>, used: bool, offload_optimizer: bool| {
        let settings = StepSettings { offload_optimizer, ..settings(64) };
        let mut trainer = trainer(world, &settings);
        if used {
            // At a rate of 0 only the moments change.
            trainer.imitation_step(&samples(&LENGTHS, 0), 0.0, &settings).expect("all ranks are there");
            trainer.reset_optimizer(optimizer());
        }
        trainer.imitation_step(&samples(&LENGTHS, 1), 1e-3, &settings).expect("all ranks are there");
        tensors(&mut trainer)
    };
    for offload in [false, true] {
        let both = [true, false].map(|used| on_ranks(2, 1, |world| reset(world, used, offload)));
        assert_eq!(both[0], both[1]);
    }
}
