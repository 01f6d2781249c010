//! What a program prints: kept in a file, with secrets blanked, and its last lines at hand.

use std::fs::File;
use std::io::{Read, Write};
use std::path::Path;

/// What stands for a secret's value.
const BLANK: &[u8] = b"[secret]";
/// How much of the end is kept at hand.
const TAIL: usize = 16 * 1024;
/// No log file grows beyond this: a program that prints without end shall not fill the disk.
const LIMIT: u64 = 256 * 1024 * 1024;

/// A log being written.
pub struct Log {
    file: Option<File>,
    redactor: Redactor,
    tail: Vec<u8>,
    written: u64,
}

impl Log {
    /// Logs to a file. Where it cannot be made, only the tail is kept.
    pub fn create(path: &Path, secrets: &[String]) -> Self {
        let file = File::options().create(true).append(true).open(path).ok();
        Self { file, redactor: Redactor::new(secrets), tail: Vec::new(), written: 0 }
    }

    /// Adds what was printed.
    pub fn write(&mut self, bytes: &[u8]) {
        let clean = self.redactor.push(bytes);
        self.keep(&clean);
    }

    fn keep(&mut self, clean: &[u8]) {
        self.tail.extend(clean);
        if self.tail.len() > 2 * TAIL {
            self.tail.drain(..self.tail.len() - TAIL);
        }
        let before = self.written;
        self.written += clean.len() as u64;
        let Some(file) = self.file.as_mut().filter(|_| before < LIMIT) else { return };
        let _ = file.write_all(clean);
        if self.written >= LIMIT {
            let _ = file.write_all(b"\n[the log ends here: it reached 256 MiB]\n");
        }
    }

    /// Adds a line of the engine's own.
    pub fn note(&mut self, line: &str) {
        self.flush();
        let line = self.redactor.clean(line);
        self.keep(format!("[cuda-agent] {line}\n").as_bytes());
    }

    /// Gives out what was held back because a secret might have been under way.
    pub fn flush(&mut self) {
        let rest = self.redactor.finish();
        self.keep(&rest);
    }

    /// The last `count` lines, without secrets.
    pub fn last_lines(&mut self, count: usize) -> Vec<String> {
        self.flush();
        let text = String::from_utf8_lossy(&self.tail);
        let lines: Vec<&str> = text.lines().collect();
        lines[lines.len().saturating_sub(count)..].iter().map(|line| (*line).to_owned()).collect()
    }

    /// Whether anything was printed.
    pub fn is_empty(&self) -> bool {
        self.written == 0
    }

    /// Blanks secrets in a text.
    pub fn redact(&self, text: &str) -> String {
        self.redactor.clean(text)
    }
}

/// Blanks secret values in a stream, across the borders of its chunks too.
#[derive(Clone)]
pub struct Redactor {
    secrets: Vec<Vec<u8>>,
    held: Vec<u8>,
}

impl Redactor {
    /// For these values; longer ones go first, since one may be part of another.
    pub fn new(secrets: &[String]) -> Self {
        let mut secrets: Vec<Vec<u8>> = Vec::from_iter(secrets.iter().flat_map(|secret| forms(secret)));
        secrets.sort_unstable_by_key(|secret| std::cmp::Reverse(secret.len()));
        secrets.dedup();
        Self { secrets, held: Vec::new() }
    }

    /// Takes a chunk and gives out what is certain.
    pub fn push(&mut self, bytes: &[u8]) -> Vec<u8> {
        if self.secrets.is_empty() {
            return bytes.to_vec();
        }
        self.held.extend(bytes);
        let mut out = Vec::with_capacity(self.held.len());
        let mut position = 0;
        while position < self.held.len() {
            let rest = &self.held[position..];
            if let Some(secret) = self.secrets.iter().find(|secret| rest.starts_with(secret)) {
                out.extend(BLANK);
                position += secret.len();
            } else if self.secrets.iter().any(|secret| secret.starts_with(rest)) {
                // It may go on in the next chunk.
                break;
            } else {
                out.push(rest[0]);
                position += 1;
            }
        }
        self.held.drain(..position);
        out
    }

    /// Gives out the rest.
    pub fn finish(&mut self) -> Vec<u8> {
        std::mem::take(&mut self.held)
    }

    /// A whole text.
    pub fn clean(&self, text: &str) -> String {
        let mut fresh = Self { secrets: self.secrets.clone(), held: Vec::new() };
        let mut out = fresh.push(text.as_bytes());
        out.extend(fresh.finish());
        String::from_utf8_lossy(&out).into_owned()
    }

    /// Whether any secret is in these bytes.
    pub fn finds(&self, bytes: &[u8]) -> bool {
        self.secrets.iter().any(|secret| memchr::memmem::find(bytes, secret).is_some())
    }

    /// Whether any secret is in a file, however large it is.
    pub fn finds_in(&self, file: &Path) -> std::io::Result<bool> {
        const STEP: usize = 1 << 20;
        let mut file = File::open(file)?;
        // The end of what was looked through is kept: a secret may go on in the next piece.
        let overlap = self.secrets.iter().map(Vec::len).max().unwrap_or(1).saturating_sub(1);
        let mut held = Vec::with_capacity(STEP + overlap);
        loop {
            let count = Read::by_ref(&mut file).take(STEP as u64).read_to_end(&mut held)?;
            if self.finds(&held) {
                return Ok(true);
            }
            if count == 0 {
                return Ok(false);
            }
            held.drain(..held.len().saturating_sub(overlap));
        }
    }

    /// Whether there is anything to look for.
    pub fn is_idle(&self) -> bool {
        self.secrets.is_empty()
    }
}

/// A secret as it is, and as JSON would write it.
fn forms(secret: &str) -> Vec<Vec<u8>> {
    if secret.is_empty() {
        return Vec::new();
    }
    let json = serde_json::to_string(secret).expect("text is JSON");
    vec![secret.as_bytes().to_vec(), json.as_bytes()[1..json.len() - 1].to_vec()]
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn no_secret_gets_through_however_it_is_cut(
            before in "[a-c]{0,6}", after in "[a-c]{0,6}", secret in "[a-c]{3,5}", cuts in prop::collection::vec(1usize..4, 1..20),
        ) {
            let text = format!("{before}{secret}{after}");
            let mut redactor = Redactor::new(std::slice::from_ref(&secret));
            let (mut out, mut rest) = (Vec::new(), text.as_bytes());
            for cut in cuts.into_iter().cycle() {
                if rest.is_empty() { break; }
                let (chunk, after) = rest.split_at(cut.min(rest.len()));
                out.extend(redactor.push(chunk));
                rest = after;
            }
            out.extend(redactor.finish());
            let out = String::from_utf8(out).unwrap();
            prop_assert!(out.contains("[secret]"));
            // Putting the secret back gives the text, so nothing else was lost.
            prop_assert_eq!(out.replace("[secret]", &secret), text);
        }
    }

    #[test]
    fn secrets_in_json_are_found_too() {
        let redactor = Redactor::new(&["a\"b\nc".to_owned()]);
        assert_eq!(redactor.clean(r#"{"x": "a\"b\nc"}"#), r#"{"x": "[secret]"}"#);
        assert!(redactor.finds(b"--a\"b\nc--"));
    }

    #[test]
    fn secrets_are_found_wherever_they_are_in_a_file() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("file");
        let redactor = Redactor::new(&["secret".to_owned()]);
        for before in [0, 1, (1 << 20) - 7, (1 << 20) - 6, (1 << 20) - 3, 1 << 20, (2 << 20) - 1] {
            std::fs::write(&file, [&vec![b's'; before], &b"secret"[..], &[b's'; 9]].concat()).unwrap();
            assert!(redactor.finds_in(&file).unwrap(), "after {before} bytes");
        }
        std::fs::write(&file, [&vec![b's'; 3 << 20], &b"secre"[..]].concat()).unwrap();
        assert!(!redactor.finds_in(&file).unwrap());
    }

    #[test]
    fn the_tail_is_the_end() {
        let folder = tempfile::tempdir().unwrap();
        let mut log = Log::create(&folder.path().join("log"), &[]);
        (0..10_000).for_each(|line| log.write(format!("line {line}\n").as_bytes()));
        assert_eq!(log.last_lines(2), ["line 9998", "line 9999"]);
    }
}
