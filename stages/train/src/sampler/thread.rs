//! The sampler's thread, and what callers hold of it.

use std::sync::mpsc::{self, Receiver, RecvError, RecvTimeoutError, Sender, TryRecvError};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::thread::JoinHandle;
use std::time::Duration;

use tch::Tensor;

use crate::TrainError;
use crate::model::Decoder;
use crate::sampler::engine::{Engine, Listener, Progress, Statistics};
use crate::sampler::{Request, Sample};
use crate::text::Tokenizer;

/// Sizes of a sampler.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Options {
    /// Sequences in the batch, at most.
    pub slots: usize,
    /// Tokens of a sequence, prompt and new ones; at most the model's positions.
    pub capacity: i64,
    /// Whether steps are torch's operators on a GPU too, for comparison.
    pub is_plain: bool,
}

impl Default for Options {
    fn default() -> Self {
        Self { slots: 64, capacity: 4096, is_plain: false }
    }
}

/// A thread that samples. Requests may come from any number of threads; dropping it ends it, and requests that wait then
/// get an error.
pub struct Sampler {
    options: Options,
    /// Behind a lock, since a sender alone can't be shared.
    commands: Mutex<Option<Sender<Command>>>,
    thread: Option<JoinHandle<()>>,
}

/// How long requests that were announced are waited for after the last one that came: who was to send them may have failed.
const LATEST: Duration = Duration::from_secs(2);

enum Command {
    Together(usize),
    Submit(Request, Waiter, Sender<Result<Progress, TrainError>>),
    Update(Vec<(String, Tensor)>, Sender<Result<u64, TrainError>>),
    Statistics(Sender<Statistics>),
}

/// Knows whether the handle still is.
struct Waiter(Weak<()>);

struct Channel {
    waiter: Waiter,
    sender: Sender<Result<Progress, TrainError>>,
}

impl Listener for Channel {
    fn is_waiting(&self) -> bool {
        self.waiter.0.strong_count() > 0
    }

    fn report(&self, progress: Progress) {
        // A handle that was dropped meanwhile is seen by the next step.
        let _gone = self.sender.send(Ok(progress));
    }
}

/// A request under way. Dropping it cancels the request.
pub struct Handle {
    events: Receiver<Result<Progress, TrainError>>,
    _alive: Arc<()>,
}

fn ended() -> TrainError {
    TrainError::new("the sampler has ended")
}

impl Handle {
    /// Waits for the sample. Errors: the request can't be served, the sampler has ended.
    pub fn wait(self) -> Result<Sample, TrainError> {
        loop {
            if let Err(sample) = self.next()? {
                return Ok(sample);
            }
        }
    }

    /// Waits for the next piece of text, which may be empty, or for the sample, after which nothing comes.
    pub fn next(&self) -> Result<Result<String, Sample>, TrainError> {
        match self.events.recv() {
            Ok(Ok(Progress::Text(text))) => Ok(Ok(text)),
            Ok(Ok(Progress::Done(sample))) => Ok(Err(sample)),
            Ok(Err(error)) => Err(error),
            Err(RecvError) => Err(ended()),
        }
    }
}

impl Sampler {
    /// Starts a thread that owns the decoder. Without a tokenizer samples have no text, and requests no stop strings.
    pub fn new(decoder: Decoder, tokenizer: Option<Tokenizer>, options: Options) -> Self {
        let options = Options { capacity: options.capacity.min(decoder.config().max_positions), ..options };
        let (commands, received) = mpsc::channel();
        let run = move || {
            let _no_gradients = tch::no_grad_guard();
            serve(Engine::new(decoder, tokenizer, options), &received);
        };
        let thread = std::thread::Builder::new().name("sampler".into()).spawn(run).expect("threads can be started");
        Self { options, commands: Mutex::new(Some(commands)), thread: Some(thread) }
    }

    /// Its sizes, as they are.
    pub fn options(&self) -> Options {
        self.options
    }

    /// Sends a command; false where the thread has ended.
    fn send(&self, command: Command) -> bool {
        let commands = self.commands.lock().unwrap_or_else(PoisonError::into_inner);
        commands.as_ref().is_some_and(|commands| commands.send(command).is_ok())
    }

    /// Begins with the next `count` requests once all of them are there, in an order of their own. What is summed up in which order
    /// depends on the sequences beside one, so that equal runs are equal to the bit only where equal batches are made.
    pub fn together(&self, count: usize) {
        self.send(Command::Together(count));
    }

    /// Puts a request into the queue. Never blocks.
    pub fn submit(&self, request: Request) -> Handle {
        let (sender, events) = mpsc::channel();
        let alive = Arc::new(());
        // Where the thread has ended the sender is dropped, and waiting says so.
        let _sent = self.send(Command::Submit(request, Waiter(Arc::downgrade(&alive)), sender));
        Handle { events, _alive: alive }
    }

    /// Replaces weights between two steps, and returns their version: 1 for the first. `weights` are those of
    /// [`Decoder::weights`], on any device, of any type; they must not change until this returns. Sequences under way go on
    /// with what they have cached; their samples say so by their versions.
    pub fn update(&self, weights: Vec<(String, Tensor)>) -> Result<u64, TrainError> {
        let (sender, answer) = mpsc::channel();
        self.send(Command::Update(weights, sender));
        answer.recv().unwrap_or_else(|RecvError| Err(ended()))
    }

    /// What was done so far.
    pub fn statistics(&self) -> Result<Statistics, TrainError> {
        let (sender, answer) = mpsc::channel();
        self.send(Command::Statistics(sender));
        answer.recv().map_err(|RecvError| ended())
    }
}

impl Drop for Sampler {
    fn drop(&mut self) {
        self.commands.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(thread) = self.thread.take() {
            // A panic of the thread has been printed, and its callers got errors.
            let _ended = thread.join();
        }
    }
}

/// Serves until the sampler is dropped: commands first, so that requests that came together share a prefill.
fn serve(mut engine: Engine<Channel>, commands: &Receiver<Command>) {
    let mut announced = 0;
    loop {
        let command = if announced > 0 {
            match commands.recv_timeout(LATEST) {
                Err(RecvTimeoutError::Disconnected) => return,
                command => command.ok(),
            }
        } else if engine.is_busy() {
            match commands.try_recv() {
                Err(TryRecvError::Disconnected) => return,
                command => command.ok(),
            }
        } else {
            match commands.recv() {
                Err(RecvError) => return,
                command => command.ok(),
            }
        };
        let was_announced = announced > 0;
        match command {
            Some(command) => handle(&mut engine, command, &mut announced),
            None if was_announced => announced = 0,
            None => engine.step(),
        }
        if was_announced && announced == 0 {
            engine.order();
        }
    }
}

fn handle(engine: &mut Engine<Channel>, command: Command, announced: &mut usize) {
    // Who doesn't wait for an answer any more doesn't get one.
    match command {
        Command::Together(count) => *announced = count,
        Command::Submit(request, waiter, sender) => {
            *announced = announced.saturating_sub(1);
            match engine.check(&request) {
                Ok(()) => engine.submit(request, Channel { waiter, sender }),
                Err(error) => drop(sender.send(Err(error))),
            }
        }
        Command::Update(weights, sender) => drop(sender.send(engine.update(&weights))),
        Command::Statistics(sender) => drop(sender.send(engine.statistics)),
    }
}
