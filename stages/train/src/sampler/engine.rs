//! One step of sampling: let sequences in, prefill their prompts, decode a token of each, let go of those that ended.
//!
//! Single-threaded and without channels: `thread.rs` has those.

use std::collections::VecDeque;
use std::rc::Rc;

use tch::{Kind, Tensor};

use crate::TrainError;
use crate::model::{Decoder, Packed};
use crate::sampler::cache::Cache;
use crate::sampler::draw::{self, Row};
use crate::sampler::fused::{self, Fused};
use crate::sampler::{Finish, Options, Request, Sample};
use crate::text::{Incremental, Stop, Stopped, Tokenizer};

/// Prompt tokens that are computed at once, at most (a longer prompt alone). 32,768 were no quicker on an H200.
const PREFILL_TOKENS: usize = 8192;

/// What a sampler did so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Statistics {
    /// Prompt tokens that were computed: fewer than were submitted where samples share a prompt.
    pub prefilled: u64,
    /// Tokens that were drawn.
    pub drawn: u64,
    /// Forward passes of one token a sequence.
    pub steps: u64,
    /// The most sequences of one step.
    pub widest: u64,
    /// Steps that were one launch: on a GPU in bfloat16.
    pub fused: u64,
}

/// What becomes of a sequence, as it happens.
pub(super) enum Progress {
    /// Text that is certain, and the tokens it took.
    Text(String),
    /// The end.
    Done(Sample),
}

/// Who waits for a sequence.
pub(super) trait Listener {
    /// Whether anybody still does.
    fn is_waiting(&self) -> bool;
    /// Hands over progress.
    fn report(&self, progress: Progress);
}

/// A sequence in the batch, in the cache's slot of the same number.
struct Sequence<L> {
    request: Request,
    listener: L,
    /// Tokens in the cache.
    cached: i64,
    /// Logits after the prompt, `[1, vocab]`; samples of the same prompt share them.
    prompt_logits: Rc<Tensor>,
    tokens: Vec<i64>,
    log_probabilities: Vec<f32>,
    decoder: Incremental,
    stop: Stop,
    text: String,
    first_version: u64,
}

/// The batch, the cache and the queue.
pub(super) struct Engine<L> {
    decoder: Decoder,
    tokenizer: Option<Tokenizer>,
    cache: Cache,
    /// Does a step in one launch, where that can be done.
    fused: Option<Fused>,
    slots: usize,
    /// Tokens of a sequence, at most.
    capacity: i64,
    waiting: VecDeque<(Request, L)>,
    active: Vec<Sequence<L>>,
    version: u64,
    pub statistics: Statistics,
}

impl<L: Listener> Engine<L> {
    pub fn new(mut decoder: Decoder, tokenizer: Option<Tokenizer>, options: Options) -> Self {
        let Options { slots, capacity, is_plain } = options;
        let cache = Cache::new(&decoder, slots, decoder.room_for_keys(capacity));
        let fused = if is_plain || decoder.is_exact() { None } else { fuse(&mut decoder, slots) };
        let (waiting, active) = (VecDeque::new(), Vec::new());
        Self {
            decoder,
            tokenizer,
            cache,
            fused,
            slots,
            capacity,
            waiting,
            active,
            version: 0,
            statistics: Statistics::default(),
        }
    }

    /// Why a request can't be served, if it can't.
    pub fn check(&self, request: &Request) -> Result<(), TrainError> {
        let settings = &request.settings;
        let vocabulary = self.decoder.config().vocabulary;
        if let Some(id) = request.prompt.iter().find(|id| !(0..vocabulary).contains(*id)) {
            return Err(TrainError::new(format!("token {id} of the prompt: the model has {vocabulary}")));
        }
        let (prompt, new) = (request.prompt.len(), settings.max_tokens);
        if prompt == 0 || new == 0 {
            return Err(TrainError::new(format!("a prompt of {prompt} tokens and {new} new ones: at least 1 of both")));
        }
        if prompt.saturating_add(new) > self.capacity as usize {
            let capacity = self.capacity;
            return Err(TrainError::new(format!(
                "a prompt of {prompt} tokens and {new} new ones: {capacity} have room"
            )));
        }
        let valid = settings.temperature >= 0.0 && settings.temperature.is_finite() && settings.top_p >= 0.0;
        if !valid {
            let (temperature, top_p) = (settings.temperature, settings.top_p);
            return Err(TrainError::new(format!("temperature {temperature}, top_p {top_p}: at least 0 each")));
        }
        if !settings.stop.is_empty() && self.tokenizer.is_none() {
            return Err(TrainError::new("stop strings need a tokenizer, and the model has none"));
        }
        Ok(())
    }

    /// Puts a request that [`check`](Self::check) found good at the end of the queue.
    pub fn submit(&mut self, request: Request, listener: L) {
        self.waiting.push_back((request, listener));
    }

    /// Orders the queue by prompts and keys.
    pub fn order(&mut self) {
        let by = |(request, _): &(Request, L), (other, _): &(Request, L)| {
            request.prompt.cmp(&other.prompt).then(request.key.0.cmp(&other.key.0))
        };
        self.waiting.make_contiguous().sort_by(by);
    }

    /// Whether a step would do anything.
    pub fn is_busy(&self) -> bool {
        !self.active.is_empty() || !self.waiting.is_empty()
    }

    /// Replaces weights. Sequences in the batch go on with keys and values of the old ones.
    pub fn update(&mut self, weights: &[(String, Tensor)]) -> Result<u64, TrainError> {
        self.decoder.set_weights(weights)?;
        self.cache.change();
        self.version += 1;
        Ok(self.version)
    }

    /// Draws one token of each sequence.
    pub fn step(&mut self) {
        self.drop_abandoned();
        self.admit();
        if !self.active.is_empty() {
            self.decode();
        }
    }

    fn drop_abandoned(&mut self) {
        self.waiting.retain(|(_, listener)| listener.is_waiting());
        for slot in (0..self.active.len()).rev() {
            if !self.active[slot].listener.is_waiting() {
                self.remove(slot);
            }
        }
    }

    /// Takes a sequence out of the batch; the last one gets its slot.
    fn remove(&mut self, slot: usize) -> Sequence<L> {
        let last = self.active.len() - 1;
        if slot != last {
            self.cache.copy(last, slot, self.active[last].cached);
        }
        self.active.swap_remove(slot)
    }

    /// Lets in as many as have room, computes each new prompt once, and draws their first tokens.
    fn admit(&mut self) {
        while self.active.len() < self.slots && !self.waiting.is_empty() {
            let first = self.active.len();
            self.take_waiting();
            let added: Vec<usize> = (first..self.active.len()).collect();
            let logits: Vec<&Tensor> = added.iter().map(|&slot| self.active[slot].prompt_logits.as_ref()).collect();
            let logits = Tensor::cat(&logits, 0);
            self.draw(&added, &logits);
        }
    }

    /// Moves requests from the queue to slots until slots or prefill are full. A prompt that a slot holds is copied from
    /// there, and computed otherwise.
    fn take_waiting(&mut self) {
        let mut to_compute: Vec<usize> = Vec::new();
        let mut tokens = 0;
        let mut sharers = Vec::new();
        while self.active.len() < self.slots {
            let Some((request, _)) = self.waiting.front() else { break };
            let same = |sequence: &Sequence<L>| {
                sequence.first_version == self.version && sequence.request.prompt == request.prompt
            };
            let source = self.active.iter().position(same);
            if source.is_none() {
                tokens += request.prompt.len();
                if tokens > PREFILL_TOKENS && !to_compute.is_empty() {
                    break;
                }
                to_compute.push(self.active.len());
            }
            let (request, listener) = self.waiting.pop_front().expect("it was there");
            if let Some(source) = source {
                sharers.push((source, self.active.len()));
            }
            self.active.push(self.sequence(request, listener));
        }
        if !to_compute.is_empty() {
            self.prefill(&to_compute);
        }
        for (source, slot) in sharers {
            let length = self.active[slot].request.prompt.len() as i64;
            self.cache.copy(source, slot, length);
            self.active[slot].prompt_logits = Rc::clone(&self.active[source].prompt_logits);
        }
    }

    fn sequence(&self, request: Request, listener: L) -> Sequence<L> {
        let stop = Stop::new(&request.settings.stop);
        let cached = request.prompt.len() as i64;
        Sequence {
            request,
            listener,
            cached,
            prompt_logits: Rc::new(Tensor::new()),
            tokens: Vec::new(),
            log_probabilities: Vec::new(),
            decoder: Incremental::new(true),
            stop,
            text: String::new(),
            first_version: self.version,
        }
    }

    /// Computes prompts, packed into one row, and keeps their keys, values and last logits.
    fn prefill(&mut self, slots: &[usize]) {
        let device = self.decoder.options().device;
        let prompts: Vec<&[i64]> = slots.iter().map(|&slot| self.active[slot].request.prompt.as_slice()).collect();
        // Prompts of one stage have their instructions in common.
        let packed = Packed::sharing(&prompts, device);
        let lengths = packed.lengths();
        let begin = |slot: usize| slot as i64 * self.cache.capacity;
        let places: Vec<i64> =
            slots.iter().zip(&lengths).flat_map(|(&slot, &length)| begin(slot)..begin(slot) + length).collect();
        let places = Tensor::from_slice(&places).to_device(device);
        let attend = |layer: usize, heads: [Tensor; 3]| {
            packed.attend(heads, |queries, keys, values| {
                self.cache.write(layer, &places, keys, values);
                self.decoder.packed_attention(queries, keys, values, &lengths)
            })
        };
        let fused = self.fused.as_ref().filter(|fused| fused.can_prefill(&packed));
        let fused = fused.map(|fused| fused.prefill(&packed, self.decoder.embed(&packed.tokens), &attend));
        let (hidden, failed) = match fused.transpose() {
            Ok(Some(hidden)) => (hidden, None),
            other => {
                let blocks = 0..self.decoder.layers();
                let hidden = blocks.fold(self.decoder.embed(&packed.tokens), |hidden, layer| {
                    let attend = |queries, keys, values| attend(layer, [queries, keys, values]);
                    self.decoder.block(layer, &hidden, &packed.positions, attend)
                });
                (hidden, other.err())
            }
        };
        let last: Vec<i64> = (0..prompts.len()).map(|index| packed.row(index, prompts[index].len() - 1)).collect();
        let last = hidden.index_select(0, &Tensor::from_slice(&last).to_device(device));
        let logits = self.decoder.head(&self.decoder.norm(&last));
        self.statistics.prefilled += packed.rows() as u64;
        for (row, &slot) in slots.iter().enumerate() {
            self.active[slot].prompt_logits = Rc::new(logits.narrow(0, row as i64, 1).copy());
        }
        failed.into_iter().for_each(|error| self.give_up_fusing(&error));
    }

    fn give_up_fusing(&mut self, error: &TrainError) {
        eprintln!("sampler: {error}; it goes on with torch's operators");
        self.fused = None;
    }

    /// Computes the last token of every sequence and draws the next one.
    fn decode(&mut self) {
        let count = self.active.len();
        self.statistics.steps += 1;
        self.statistics.widest = self.statistics.widest.max(count as u64);
        let all: Vec<usize> = (0..count).collect();
        let drawn = match self.fused_step() {
            Some(drawn) => drawn,
            None => Drawn::Logits(self.logits()),
        };
        self.active.iter_mut().for_each(|one| one.cached += 1);
        match drawn {
            Drawn::Tokens(tokens, chosen) => self.take(&all, tokens, chosen),
            Drawn::Logits(logits) => self.draw(&all, &logits),
        }
    }

    /// The step in one launch, where that can be done.
    fn fused_step(&mut self) -> Option<Drawn> {
        let fused = self.fused.as_mut()?;
        let row = |one: &Sequence<L>| fused::Row {
            token: *one.tokens.last().expect("the prompt gave the first"),
            position: one.cached,
            temperature: one.request.settings.temperature,
            key: one.request.key,
            count: one.tokens.len(),
        };
        let rows: Vec<fused::Row> = self.active.iter().map(row).collect();
        let drawn = match self.active.iter().any(|one| draw::truncates(&one.request.settings)) {
            true => fused.logits(&rows, &self.cache).map(|logits| Drawn::Logits(logits.to_kind(Kind::Float))),
            false => fused.step(&rows, &self.cache).map(|(tokens, chosen)| Drawn::Tokens(tokens, chosen)),
        };
        match drawn {
            Ok(drawn) => {
                self.statistics.fused += 1;
                Some(drawn)
            }
            Err(error) => {
                self.give_up_fusing(&error);
                None
            }
        }
    }

    /// Logits of the next token of every sequence, by torch's operators.
    fn logits(&self) -> Tensor {
        let device = self.decoder.options().device;
        let tensor = |numbers: Vec<i64>| Tensor::from_slice(&numbers).to_device(device);
        let count = self.active.len();
        let tokens = self.active.iter().map(|one| *one.tokens.last().expect("the prompt gave the first")).collect();
        let positions: Vec<i64> = self.active.iter().map(|one| one.cached).collect();
        let longest = positions.iter().max().expect("there is a sequence") + 1;
        let longest = self.decoder.room_for_keys(longest);
        let places = (0i64..).zip(&positions).map(|(slot, position)| slot * self.cache.capacity + position).collect();
        let (places, positions) = (tensor(places), tensor(positions));
        let columns = Tensor::arange(longest, (Kind::Int64, device)).unsqueeze(0);
        let visible = columns.le_tensor(&positions.unsqueeze(1)).reshape([count as i64, 1, 1, longest]);
        let mut hidden = self.decoder.embed(&tensor(tokens));
        for layer in 0..self.decoder.layers() {
            hidden = self.decoder.block(layer, &hidden, &positions, |queries, keys, values| {
                self.cache.write(layer, &places, &keys, &values);
                self.cache.attend(layer, &queries, &visible)
            });
        }
        self.decoder.head(&self.decoder.norm(&hidden))
    }

    /// Draws a token of each of these slots from its row of logits.
    fn draw(&mut self, slots: &[usize], logits: &Tensor) {
        let row = |&slot: &usize| {
            let one = &self.active[slot];
            let uniform = draw::uniform(&one.request.key, one.tokens.len());
            Row { settings: &one.request.settings, uniform }
        };
        let (tokens, chosen) = draw::draw(logits, &slots.iter().map(row).collect::<Vec<_>>());
        self.take(slots, tokens, chosen);
    }

    /// Appends what was drawn for these slots, and lets go of sequences that ended.
    fn take(&mut self, slots: &[usize], tokens: Vec<i64>, chosen: Vec<f32>) {
        self.statistics.drawn += tokens.len() as u64;
        let mut ended = Vec::new();
        for ((&slot, token), log_probability) in slots.iter().zip(tokens).zip(chosen) {
            let one = &mut self.active[slot];
            one.tokens.push(token);
            one.log_probabilities.push(log_probability);
            if let Some(finish) = one.read(token, self.tokenizer.as_ref()) {
                ended.push((slot, finish));
            }
        }
        // From the last on, so that slots which move are none of those.
        for (slot, finish) in ended.into_iter().rev() {
            let one = self.remove(slot);
            let versions = (one.first_version, self.version);
            let Sequence { tokens, log_probabilities, text, listener, .. } = one;
            listener.report(Progress::Done(Sample { tokens, log_probabilities, text, finish, versions }));
        }
    }
}

/// What a step gives.
enum Drawn {
    /// Tokens and their log-probabilities.
    Tokens(Vec<i64>, Vec<f32>),
    /// `[n, vocab]`, float32: by torch's operators, or some row is not drawn from all tokens.
    Logits(Tensor),
}

/// A model on a GPU in bfloat16 gets its steps fused; what stands in the way there is told once.
fn fuse(decoder: &mut Decoder, slots: usize) -> Option<Fused> {
    let is_wanted = decoder.options().device.is_cuda() && decoder.options().kind == Kind::BFloat16;
    let why = match Fused::new(decoder, slots) {
        Ok(Ok(fused)) => return Some(fused),
        Ok(Err(why)) => why,
        Err(error) => error.to_string(),
    };
    if is_wanted {
        eprintln!("sampler: steps by torch's operators, several times slower: {why}");
    }
    None
}

impl<L: Listener> Sequence<L> {
    /// Turns a new token to text, and says whether it ends the sequence.
    fn read(&mut self, token: i64, tokenizer: Option<&Tokenizer>) -> Option<Finish> {
        let is_end = self.request.settings.ends.contains(&token);
        let is_last = self.tokens.len() >= self.request.settings.max_tokens;
        let mut piece = match tokenizer {
            Some(tokenizer) if !is_end => self.decoder.push(tokenizer, token),
            _ => String::new(),
        };
        if let Some(tokenizer) = tokenizer.filter(|_| is_end || is_last) {
            piece.push_str(&self.decoder.finish(tokenizer));
        }
        let (mut certain, stopped) = match self.stop.push(&piece) {
            Stopped::No(text) => (text, false),
            Stopped::Yes(text) => (text, true),
        };
        if (is_end || is_last) && !stopped {
            certain.push_str(&self.stop.finish());
        }
        self.text.push_str(&certain);
        self.listener.report(Progress::Text(certain));
        match (stopped, is_end, is_last) {
            (true, _, _) => Some(Finish::Stop),
            (_, true, _) => Some(Finish::End),
            (_, _, true) => Some(Finish::Length),
            _ => None,
        }
    }
}
