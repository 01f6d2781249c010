//! What a program prints: kept in a file, with secrets blanked, and its last lines at hand.

use std::fs::File;
use std::io::Write;
use std::path::Path;

use aho_corasick::{AhoCorasick, Match, PatternID};

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

/// Blanks secret values in a stream, across the borders of its chunks too. Where values overlap, all of them go.
#[derive(Clone)]
pub struct Redactor {
    /// `None` where there is nothing to look for.
    finder: Option<AhoCorasick>,
    secrets: Vec<Vec<u8>>,
    /// What may become a secret with the next chunk.
    held: Vec<u8>,
    /// How much of the beginning of `held` a blank that was given out already stands for, and for which secret last.
    blanked: (usize, Option<PatternID>),
}

impl Redactor {
    /// For these values.
    pub fn new(secrets: &[String]) -> Self {
        let mut secrets: Vec<Vec<u8>> = secrets.iter().flat_map(|secret| forms(secret)).collect();
        secrets.sort_unstable();
        secrets.dedup();
        let finder = || AhoCorasick::new(&secrets).expect("secrets are few and fit the memory");
        Self { finder: (!secrets.is_empty()).then(finder), secrets, held: Vec::new(), blanked: (0, None) }
    }

    /// Takes a chunk and gives out what is certain.
    pub fn push(&mut self, bytes: &[u8]) -> Vec<u8> {
        self.held.extend(bytes);
        let longest = self.secrets.iter().map(Vec::len).max().unwrap_or(0);
        let may_go_on = |from: &usize| {
            let rest = &self.held[*from..];
            self.secrets.iter().any(|secret| secret.len() > rest.len() && secret.starts_with(rest))
        };
        let open = (self.held.len().saturating_sub(longest)..self.held.len()).find(may_go_on);
        self.give_out(open.unwrap_or(self.held.len()))
    }

    /// Gives out the rest.
    pub fn finish(&mut self) -> Vec<u8> {
        self.give_out(self.held.len())
    }

    /// Gives out what is held up to `end`, from where on no secret begins that is not whole.
    fn give_out(&mut self, end: usize) -> Vec<u8> {
        let Some(finder) = &self.finder else { return std::mem::take(&mut self.held) };
        let mut found: Vec<Match> = finder.find_overlapping_iter(&self.held).collect();
        found.sort_unstable_by_key(Match::start);
        let mut out = Vec::with_capacity(end);
        // What comes before it is given out or blanked.
        let (mut done, mut last) = self.blanked;
        for secret in found.iter().take_while(|secret| secret.start() < end) {
            if secret.start() >= done {
                out.extend(&self.held[done..secret.start()]);
                out.extend(BLANK);
            } else if last == Some(secret.pattern()) {
                // One value that overlaps itself: a blank stands for it once.
                continue;
            }
            (done, last) = (done.max(secret.end()), Some(secret.pattern()));
        }
        out.extend(self.held.get(done..end).unwrap_or_default());
        self.blanked = (done.max(end) - end, last);
        self.held.drain(..end);
        out
    }

    /// A whole text.
    pub fn clean(&self, text: &str) -> String {
        let mut fresh = Self { held: text.as_bytes().to_vec(), blanked: (0, None), ..self.clone() };
        String::from_utf8_lossy(&fresh.finish()).into_owned()
    }

    /// Whether any secret is in these bytes.
    pub fn finds(&self, bytes: &[u8]) -> bool {
        self.finder.as_ref().is_some_and(|finder| finder.is_match(bytes))
    }

    /// Whether any secret is in a file, however large it is.
    pub fn finds_in(&self, file: &Path) -> std::io::Result<bool> {
        let Some(finder) = &self.finder else { return Ok(false) };
        Ok(finder.stream_find_iter(File::open(file)?).next().transpose()?.is_some())
    }

    /// Whether there is anything to look for.
    pub fn is_idle(&self) -> bool {
        self.finder.is_none()
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

    fn in_chunks(secrets: [&str; 2], chunks: &[&str]) -> String {
        let mut redactor = Redactor::new(&secrets.map(str::to_owned));
        let mut out: Vec<u8> = chunks.iter().flat_map(|chunk| redactor.push(chunk.as_bytes())).collect();
        out.extend(redactor.finish());
        String::from_utf8(out).unwrap()
    }

    #[test]
    fn nothing_is_left_of_a_secret_that_goes_on_from_another() {
        for chunks in [&["-abcdef-"][..], &["-abc", "def-"], &["-abcd", "e", "f-"], &["-a", "bcdef-"]] {
            assert_eq!(in_chunks(["abc", "abcdef"], chunks), "-[secret]-", "{chunks:?}");
            assert_eq!(in_chunks(["abcd", "cdef"], chunks), "-[secret]-", "{chunks:?}");
            assert_eq!(in_chunks(["abc", "def"], chunks), "-[secret][secret]-", "{chunks:?}");
        }
        assert_eq!(in_chunks(["abcd", "cdef"], &["abcd", "ex"]), "[secret]ex");
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
