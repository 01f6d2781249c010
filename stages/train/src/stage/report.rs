//! Metrics of a run, in the forms that people look at: a table, verl's JSON lines, TensorBoard's events, plots.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs::{self, File};
use std::io::{BufWriter, Write};
use std::path::Path;
use std::time::SystemTime;

use cuda_agent_protocol::Request;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::output_path;
use crate::TrainError;
use crate::trainer::Metrics;

/// The file of a checkpoint.
const FILE: &str = "metrics.jsonl";

/// A step's metrics, as a line of the file.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct Line {
    step: u64,
    /// Seconds since 1970 when the step ended.
    time: f64,
    data: Metrics,
}

/// The metrics of a run; each checkpoint holds those up to it.
#[derive(Default)]
pub struct Log {
    lines: Vec<Line>,
}

impl Log {
    /// Reads what a checkpoint holds.
    pub fn load(folder: &Path) -> Result<Self, TrainError> {
        let path = folder.join(FILE);
        let text = fs::read_to_string(&path).map_err(TrainError::file(&path))?;
        let lines = text.lines().map(serde_json::from_str).collect::<Result<Vec<Line>, _>>();
        Ok(Self { lines: lines.map_err(TrainError::file(&path))? })
    }

    /// Writes it into a checkpoint.
    pub fn save(&self, folder: &Path) -> Result<(), TrainError> {
        let text: String =
            self.lines.iter().map(|line| serde_json::to_string(line).expect("plain data") + "\n").collect();
        crate::checkpoint::write_file(&folder.join(FILE), text.as_bytes())
    }

    /// Adds a step. What is not finite is left out: JSON has no word for it.
    pub fn push(&mut self, step: u64, mut data: Metrics) {
        data.retain(|_, value| value.is_finite());
        let time = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).map_or(0.0, |since| since.as_secs_f64());
        self.lines.push(Line { step, time, data });
    }

    /// Writes the outputs `metrics` (step, name, value) and `report`.
    pub fn write(&self, request: &Request) -> Result<(), TrainError> {
        let rows = self.lines.iter().flat_map(|line| {
            line.data.iter().map(|(name, value)| json!({"step": line.step, "name": name, "value": value}))
        });
        write_lines(output_path(request, "metrics"), rows)?;
        let folder = output_path(request, "report");
        fs::create_dir_all(folder).map_err(TrainError::file(folder))?;
        let verl: String =
            self.lines.iter().map(|line| json!({"step": line.step, "data": line.data}).to_string() + "\n").collect();
        let write = |name: &str, bytes: &[u8]| {
            let path = folder.join(name);
            fs::write(&path, bytes).map_err(TrainError::file(&path))
        };
        write("metrics.jsonl", verl.as_bytes())?;
        write("events.out.tfevents.0.cuda-agent", &self.events())?;
        write("index.html", self.page(&request.stage).as_bytes())
    }

    /// TensorBoard's file of events: TFRecords of `Event` messages.
    fn events(&self) -> Vec<u8> {
        let mut bytes = Vec::new();
        let start = self.lines.first().map_or(0.0, |line| line.time);
        record(&mut bytes, &[double(1, start), bytes_field(3, b"brain.Event:2")].concat());
        for line in &self.lines {
            let summary: Vec<u8> = line
                .data
                .iter()
                .flat_map(|(name, value)| bytes_field(1, &[bytes_field(1, name.as_bytes()), float(2, *value)].concat()))
                .collect();
            let event = [double(1, line.time), varint_field(2, line.step), bytes_field(5, &summary)].concat();
            record(&mut bytes, &event);
        }
        bytes
    }

    /// One page with a plot for each metric.
    fn page(&self, stage: &str) -> String {
        let mut series: BTreeMap<&str, Vec<(f64, f64)>> = BTreeMap::new();
        for line in &self.lines {
            for (name, value) in &line.data {
                series.entry(name).or_default().push((line.step as f64, *value));
            }
        }
        let plots: String = series.iter().map(|(name, points)| plot(name, points)).collect();
        format!(
            "<!doctype html><html lang=\"en\"><meta charset=\"utf-8\"><title>{stage}</title><style>\
             :root{{color-scheme:light dark}}body{{font:14px system-ui;margin:24px}}\
             main{{display:grid;grid-template-columns:repeat(auto-fill,minmax(320px,1fr));gap:16px}}\
             figure{{margin:0}}figcaption{{font-weight:600}}svg{{width:100%;height:160px;overflow:visible}}\
             polyline{{fill:none;stroke:#2a78d6;stroke-width:1.5;vector-effect:non-scaling-stroke}}\
             small{{opacity:.7}}</style><h1>{stage}</h1><p>{} steps</p><main>{plots}</main></html>\n",
            self.lines.len()
        )
    }
}

/// A line through the points, scaled to its own range, with first, last, least and greatest value in words.
fn plot(name: &str, points: &[(f64, f64)]) -> String {
    let range = |values: &mut dyn Iterator<Item = f64>| {
        values.fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), value| (low.min(value), high.max(value)))
    };
    let (left, right) = range(&mut points.iter().map(|point| point.0));
    let (low, high) = range(&mut points.iter().map(|point| point.1));
    let place = |value: f64, from: f64, to: f64, size: f64| {
        if to > from { (value - from) / (to - from) * size } else { size / 2.0 }
    };
    let mut line = String::new();
    for (step, value) in points {
        let (x, y) = (place(*step, left, right, 300.0), 100.0 - place(*value, low, high, 100.0));
        write!(line, "{x:.1},{y:.1} ").expect("strings take any text");
    }
    let (first, last) = (points.first().map_or(0.0, |point| point.1), points.last().map_or(0.0, |point| point.1));
    format!(
        "<figure><figcaption>{name}</figcaption><svg viewBox=\"0 0 300 100\" preserveAspectRatio=\"none\">\
         <polyline points=\"{}\"/></svg><small>step {left} to {right}: {first:.4} → {last:.4}; {low:.4} to {high:.4}</small></figure>",
        line.trim_end()
    )
}

/// Writes a table output as JSON lines beside the Parquet path.
pub fn write_lines(path: &Path, rows: impl Iterator<Item = Value>) -> Result<(), TrainError> {
    let path = path.with_extension("jsonl");
    let mut file = BufWriter::new(File::create(&path).map_err(TrainError::file(&path))?);
    for row in rows {
        writeln!(file, "{row}").map_err(TrainError::file(&path))?;
    }
    file.flush().map_err(TrainError::file(&path))
}

fn varint(mut value: u64) -> Vec<u8> {
    let mut bytes = Vec::new();
    while value >= 0x80 {
        bytes.push(value as u8 | 0x80);
        value >>= 7;
    }
    bytes.push(value as u8);
    bytes
}

fn varint_field(number: u64, value: u64) -> Vec<u8> {
    [varint(number << 3), varint(value)].concat()
}

fn double(number: u64, value: f64) -> Vec<u8> {
    [varint(number << 3 | 1), value.to_le_bytes().to_vec()].concat()
}

fn float(number: u64, value: f64) -> Vec<u8> {
    [varint(number << 3 | 5), (value as f32).to_le_bytes().to_vec()].concat()
}

fn bytes_field(number: u64, value: &[u8]) -> Vec<u8> {
    [varint(number << 3 | 2), varint(value.len() as u64), value.to_vec()].concat()
}

/// Appends a TFRecord: length, its checksum, the bytes, their checksum.
fn record(file: &mut Vec<u8>, bytes: &[u8]) {
    let length = (bytes.len() as u64).to_le_bytes();
    file.extend(length);
    file.extend(masked_crc(&length).to_le_bytes());
    file.extend(bytes);
    file.extend(masked_crc(bytes).to_le_bytes());
}

/// CRC-32C (Castagnoli), rotated and shifted as TFRecords have it.
fn masked_crc(bytes: &[u8]) -> u32 {
    let mut crc = !0u32;
    for byte in bytes {
        crc ^= u32::from(*byte);
        for _ in 0..8 {
            crc = if crc & 1 == 1 { crc >> 1 ^ 0x82f6_3b78 } else { crc >> 1 };
        }
    }
    (!crc).rotate_right(15).wrapping_add(0xa282_ead8)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn metrics(value: f64) -> Metrics {
        Metrics::from([("actor/entropy".to_owned(), value), ("not/finite".to_owned(), f64::NAN)])
    }

    #[test]
    fn a_checkpoint_has_the_steps_up_to_it() {
        let (three, five) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let mut log = Log::default();
        (1..=3).for_each(|step| log.push(step, metrics(step as f64)));
        log.save(three.path()).unwrap();
        (4..=5).for_each(|step| log.push(step, metrics(step as f64)));
        log.save(five.path()).unwrap();
        let steps = |folder: &Path| Log::load(folder).unwrap().lines.iter().map(|line| line.step).collect::<Vec<_>>();
        assert_eq!((steps(three.path()), steps(five.path())), (vec![1, 2, 3], vec![1, 2, 3, 4, 5]));
        assert_eq!(Log::load(five.path()).unwrap().lines, log.lines);
    }

    /// The check value of CRC-32C is e3069283 for "123456789".
    #[test]
    fn checksums_are_castagnolis() {
        let unmasked = masked_crc(b"123456789").wrapping_sub(0xa282_ead8).rotate_left(15);
        assert_eq!(unmasked, 0xe306_9283);
    }

    #[test]
    fn a_page_has_a_plot_for_each_metric() {
        let mut log = Log::default();
        (1..=3).for_each(|step| log.push(step, metrics(step as f64)));
        let page = log.page("policy");
        assert!(page.contains("<polyline points=\"0.0,100.0 150.0,50.0 300.0,0.0\"/>"), "{page}");
        assert!(page.contains("step 1 to 3: 1.0000 → 3.0000") && !page.contains("not/finite"));
    }
}
