//! The parent's end of [`super::child`]: a process that holds a model and samples from it.

use std::collections::HashMap;
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::time::{Duration, Instant};

use cuda_agent_builtin::train_program::{self, PROGRAM};

use super::child::{FromSampler, Ready, SampleAnswer, SampleRequest, ToSampler};
use super::slots::Slots;
use super::{Completion, Identity, Policy, PolicyError, Request};

/// How long it may take to end once it is told to.
const GRACE: Duration = Duration::from_secs(10);

type Answer = Result<SampleAnswer, String>;

/// Requests that wait for their answers; `None` once there will be none any more.
type Waiting = Mutex<Option<HashMap<u64, mpsc::Sender<Answer>>>>;

/// A model in a process of its own.
pub struct Sampler {
    ready: Ready,
    digest: Option<String>,
    input: Mutex<Option<ChildStdin>>,
    waiting: Arc<Waiting>,
    slots: Slots,
    next: AtomicU64,
    child: Mutex<Child>,
}

/// Where [`PROGRAM`] is, or what builds it.
pub fn find() -> Result<PathBuf, PolicyError> {
    train_program::find().ok_or_else(missing)
}

pub(super) fn missing() -> PolicyError {
    PolicyError::environment(
        format!("a model artifact is sampled from by {PROGRAM}, which is not there"),
        "`make train-tools` builds it, beside cuda-agent",
    )
}

impl Sampler {
    /// Starts `PROGRAM sample MODEL`, with `options` behind that, and waits until the model is loaded. With `gpu` it sees that
    /// one alone.
    pub fn start(
        program: &Path,
        model: &Path,
        options: &[String],
        digest: Option<String>,
        gpu: Option<&str>,
    ) -> Result<Self, PolicyError> {
        let mut command = train_program::command(program);
        command.arg("sample").arg(model).args(options).stdin(Stdio::piped()).stdout(Stdio::piped());
        if let Some(gpu) = gpu {
            command.env("CUDA_VISIBLE_DEVICES", gpu);
        }
        let broken = |message: String| PolicyError::environment(message, "what it printed is in the stage's log");
        let mut child = command.spawn().map_err(|error| broken(format!("{}: {error}", program.display())))?;
        let input = child.stdin.take().expect("it is piped");
        let mut lines = BufReader::new(child.stdout.take().expect("it is piped")).lines();
        let first = lines.next().and_then(Result::ok);
        let ready = match first.as_deref().map(serde_json::from_str) {
            Some(Ok(FromSampler::Ready(ready))) => ready,
            said => {
                let _ = child.kill();
                let status = child.wait().map(|status| status.to_string()).unwrap_or_default();
                let why = said.map_or_else(|| format!("it ended ({status})"), |_| format!("it says {first:?}"));
                return Err(broken(format!("{} did not load the model: {why}", program.display())));
            }
        };
        let waiting = Arc::new(Mutex::new(Some(HashMap::new())));
        let answers = waiting.clone();
        std::thread::spawn(move || deliver(lines, &answers));
        Ok(Self {
            slots: Slots::new(ready.width),
            ready,
            digest,
            input: Mutex::new(Some(input)),
            waiting,
            next: AtomicU64::new(1),
            child: Mutex::new(child),
        })
    }

    fn send(&self, request: SampleRequest) -> std::io::Result<()> {
        let mut line = serde_json::to_vec(&ToSampler::Request(request))?;
        line.push(b'\n');
        let mut input = self.input.lock().expect("no panics while it is held");
        input.as_mut().expect("it is closed by `drop` alone").write_all(&line)
    }

    fn ended(&self) -> PolicyError {
        let status = self.child.lock().expect("no panics while it is held").try_wait();
        let status = status.ok().flatten().map(|status| format!(" ({status})")).unwrap_or_default();
        PolicyError::environment(
            format!("the sampler ended while it was asked{status}"),
            "what it printed is in the stage's log; what was answered is kept",
        )
    }
}

/// Hands each answer to whoever waits for it, until there are no more.
fn deliver(lines: impl Iterator<Item = std::io::Result<String>>, waiting: &Waiting) {
    for line in lines.map_while(Result::ok) {
        let (id, answer) = match serde_json::from_str(&line) {
            Ok(FromSampler::Answer(answer)) => (answer.id, Ok(answer)),
            Ok(FromSampler::Error(error)) => (error.id, Err(error.message)),
            _ => {
                eprintln!("the sampler says what is no answer: {}", line.chars().take(200).collect::<String>());
                break;
            }
        };
        let mut waiting = waiting.lock().expect("no panics while it is held");
        if let Some(sender) = waiting.as_mut().and_then(|waiting| waiting.remove(&id)) {
            // Whoever asked may have gone.
            let _ = sender.send(answer);
        }
    }
    // Their receivers find the senders gone.
    waiting.lock().expect("no panics while it is held").take();
}

impl Policy for Sampler {
    fn identity(&self) -> Identity {
        Identity { model: self.ready.model.clone(), digest: self.digest.clone() }
    }

    fn width(&self) -> usize {
        self.ready.width.max(1)
    }

    fn complete(&self, request: &Request) -> Result<Completion, PolicyError> {
        let started = Instant::now();
        let _slot = self.slots.take();
        let id = self.next.fetch_add(1, Ordering::Relaxed);
        let (sender, receiver) = mpsc::channel();
        match self.waiting.lock().expect("no panics while it is held").as_mut() {
            Some(waiting) => drop(waiting.insert(id, sender)),
            None => return Err(self.ended()),
        }
        self.send(SampleRequest::of(request, id)).map_err(|_| self.ended())?;
        let answer = receiver.recv().map_err(|_| self.ended())?.map_err(PolicyError::Refused)?;
        if answer.token_ids.len() != answer.log_probs.len() {
            let (ids, log_probs) = (answer.token_ids.len(), answer.log_probs.len());
            let message = format!("the sampler gives {ids} token ids with {log_probs} log-probabilities");
            return Err(PolicyError::environment(message, "it is not of this version: `make train-tools`"));
        }
        Ok(answer.completion(started.elapsed()))
    }
}

impl Drop for Sampler {
    fn drop(&mut self) {
        // The end of its input is the end of its work.
        self.input.lock().map(|mut input| input.take()).ok();
        let Ok(child) = self.child.get_mut() else { return };
        let deadline = Instant::now() + GRACE;
        while matches!(child.try_wait(), Ok(None)) {
            if Instant::now() > deadline {
                let _ = child.kill();
                let _ = child.wait();
                return;
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}
