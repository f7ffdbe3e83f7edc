//! The metrics of a run as an event file that TensorBoard reads, written by hand: two small formats need no dependency.
//!
//! A file is a row of TFRecords, each `length: u64, crc(length): u32, data, crc(data): u32` in little-endian order with
//! CRC-32C masked by a rotation. The data is a protobuf `Event`: wall time (field 1, double), step (2, varint), and
//! either the file version (3, string) or a `Summary` (5) of `Value`s (1), each a tag (1, string) and a number (2, float).

use std::fs::File;
use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use serde_json::{Map, Value};

/// The event file cannot be written.
#[derive(Debug, thiserror::Error)]
#[error("{path}: cannot be written: {source}: free some space or check the permissions")]
pub struct EventError {
    path: PathBuf,
    source: std::io::Error,
}

/// The event file of one run, a view of its `metrics.jsonl`: opened anew it is written anew from there, so a resumed run
/// shows no step twice.
pub struct EventWriter {
    path: PathBuf,
    file: File,
    evaluations: u64,
}

impl EventWriter {
    /// Replaces the event files in `run_directory/tensorboard` by one that holds what `metrics.jsonl` holds so far.
    /// Lines of it that are not JSON objects are left out: the run page is where they are complained about.
    pub fn open(run_directory: &Path) -> Result<EventWriter, EventError> {
        let directory = run_directory.join("tensorboard");
        remove_old_files(&directory).map_err(|source| EventError { path: directory.clone(), source })?;
        let started = seconds_since_epoch();
        let path = directory.join(format!("events.out.tfevents.{:010}.learner", started as u64));
        let file = File::create(&path).map_err(|source| EventError { path: path.clone(), source })?;
        let mut writer = EventWriter { path, file, evaluations: 0 };
        writer.write(&framed(&version_event(started)))?;
        let metrics = std::fs::read(run_directory.join("metrics.jsonl")).unwrap_or_default();
        for line in String::from_utf8_lossy(&metrics).lines() {
            if let Ok(record) = serde_json::from_str(line) {
                writer.append(&record)?;
            }
        }
        Ok(writer)
    }

    /// Adds one record of the metrics: every number in it becomes the scalar `stage/field` (or `stage/field/name`) at the
    /// record's step. Evaluations are one series of the run, `evaluation/field`; one without a step counts as the next one.
    pub fn append(&mut self, record: &Map<String, Value>) -> Result<(), EventError> {
        let text = |field: &str| record.get(field).and_then(Value::as_str);
        let evaluation = text("kind") == Some("evaluation");
        let stage = if evaluation { "evaluation" } else { text("stage").unwrap_or("run") };
        let mut scalars = Vec::new();
        for (field, value) in record.iter().filter(|(field, _)| *field != "step") {
            collect_scalars(&format!("{stage}/{field}"), value, &mut scalars);
        }
        let step = record.get("step").and_then(Value::as_u64).unwrap_or(self.evaluations);
        self.evaluations += u64::from(evaluation);
        if scalars.is_empty() { Ok(()) } else { self.write(&framed(&scalar_event(seconds_since_epoch(), step, &scalars))) }
    }

    fn write(&mut self, bytes: &[u8]) -> Result<(), EventError> {
        self.file.write_all(bytes).map_err(|source| EventError { path: self.path.clone(), source })
    }
}

/// Makes the directory, and removes the event files of an earlier start of the same run.
fn remove_old_files(directory: &Path) -> std::io::Result<()> {
    std::fs::create_dir_all(directory)?;
    for entry in std::fs::read_dir(directory)? {
        let entry = entry?;
        if entry.file_name().to_string_lossy().starts_with("events.out.tfevents.") {
            match std::fs::remove_file(entry.path()) {
                Err(error) if error.kind() != ErrorKind::NotFound => return Err(error),
                _ => {}
            }
        }
    }
    Ok(())
}

fn seconds_since_epoch() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |elapsed| elapsed.as_secs_f64())
}

/// The numbers within `value`, each under its path.
fn collect_scalars(tag: &str, value: &Value, scalars: &mut Vec<(String, f32)>) {
    match value {
        Value::Number(number) => scalars.extend(number.as_f64().map(|number| (tag.to_string(), number as f32))),
        Value::Object(fields) => {
            fields.iter().for_each(|(name, value)| collect_scalars(&format!("{tag}/{name}"), value, scalars))
        }
        Value::Array(items) => {
            items.iter().enumerate().for_each(|(index, value)| collect_scalars(&format!("{tag}/{index}"), value, scalars));
        }
        Value::Null | Value::Bool(_) | Value::String(_) => {}
    }
}

/// The first event of every file.
fn version_event(wall_time: f64) -> Vec<u8> {
    let mut event = vec![0x09];
    event.extend_from_slice(&wall_time.to_le_bytes());
    put_bytes(&mut event, 3, b"brain.Event:2");
    event
}

fn scalar_event(wall_time: f64, step: u64, scalars: &[(String, f32)]) -> Vec<u8> {
    let mut summary = Vec::new();
    for (tag, value) in scalars {
        let mut entry = Vec::new();
        put_bytes(&mut entry, 1, tag.as_bytes());
        entry.push(0x15);
        entry.extend_from_slice(&value.to_le_bytes());
        put_bytes(&mut summary, 1, &entry);
    }
    let mut event = vec![0x09];
    event.extend_from_slice(&wall_time.to_le_bytes());
    event.push(0x10);
    put_varint(&mut event, step);
    put_bytes(&mut event, 5, &summary);
    event
}

/// A length-delimited protobuf field.
fn put_bytes(out: &mut Vec<u8>, field: u64, bytes: &[u8]) {
    put_varint(out, field << 3 | 2);
    put_varint(out, bytes.len() as u64);
    out.extend_from_slice(bytes);
}

fn put_varint(out: &mut Vec<u8>, mut value: u64) {
    while value >= 0x80 {
        out.push(value as u8 | 0x80);
        value >>= 7;
    }
    out.push(value as u8);
}

/// `data` as one TFRecord.
fn framed(data: &[u8]) -> Vec<u8> {
    let length = (data.len() as u64).to_le_bytes();
    [&length[..], &masked_crc(&length).to_le_bytes(), data, &masked_crc(data).to_le_bytes()].concat()
}

/// The checksum as TFRecord stores it, so that a checksum of data that holds checksums stays strong.
fn masked_crc(data: &[u8]) -> u32 {
    crc32c(data).rotate_right(15).wrapping_add(0xa282_ead8)
}

/// CRC-32C (Castagnoli), reflected, one bit at a time: event files are small.
fn crc32c(data: &[u8]) -> u32 {
    let mut crc = !0u32;
    for &byte in data {
        crc ^= u32::from(byte);
        for _ in 0..8 {
            crc = if crc & 1 == 1 { crc >> 1 ^ 0x82f6_3b78 } else { crc >> 1 };
        }
    }
    !crc
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn checksum_has_the_published_values() {
        assert_eq!(crc32c(b"123456789"), 0xe306_9283);
        assert_eq!(crc32c(&[0; 32]), 0x8a91_36aa, "RFC 3720, B.4");
        assert_eq!(crc32c(&[0xff; 32]), 0x62a8_ab43, "RFC 3720, B.4");
    }

    #[test]
    fn bytes_equal_those_of_an_independent_writer() {
        let scalars = [("rl/loss".to_string(), -0.125), ("rl/reward_mean".to_string(), 0.4)];
        let bytes = [framed(&version_event(1_700_000_000.5)), framed(&scalar_event(1_700_000_001.25, 300, &scalars))].concat();
        assert_eq!(bytes, include_bytes!("../../tests/fixtures/tensorboard/events.bin"));
    }

    fn record(text: &str) -> Map<String, Value> {
        serde_json::from_str(text).unwrap()
    }

    /// The tags of a file, found as text: good enough to see what was written.
    fn tags_in(run: &Path, tag: &str) -> usize {
        let mut files = std::fs::read_dir(run.join("tensorboard")).unwrap();
        let bytes = std::fs::read(files.next().unwrap().unwrap().path()).unwrap();
        assert!(files.next().is_none(), "one file only");
        String::from_utf8_lossy(&bytes).matches(tag).count()
    }

    #[test]
    fn a_resumed_run_shows_no_step_twice() {
        let run = tempfile::tempdir().unwrap();
        let mut writer = EventWriter::open(run.path()).unwrap();
        for _ in 0..3 {
            writer
                .append(&record(r#"{"stage":"rl","step":1,"loss":0.5,"endings":{"submitted":3},"name":"x","gone":null}"#))
                .unwrap();
        }
        assert_eq!((tags_in(run.path(), "rl/loss"), tags_in(run.path(), "rl/endings/submitted")), (3, 3));
        std::fs::write(run.path().join("metrics.jsonl"), "{\"stage\":\"rl\",\"step\":1,\"loss\":0.5}\n{\"sta").unwrap();
        let mut writer = EventWriter::open(run.path()).unwrap();
        writer.append(&record(r#"{"stage":"after_rl","kind":"evaluation","name":"after_rl","ci95":[0.1,0.2]}"#)).unwrap();
        assert_eq!((tags_in(run.path(), "rl/loss"), tags_in(run.path(), "evaluation/ci95/1")), (1, 1));
    }

    #[test]
    fn an_unwritable_place_is_named() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let message = EventWriter::open(file.path()).err().unwrap().to_string();
        assert!(message.contains("tensorboard: cannot be written"), "{message}");
    }
}
