//! `cuda-agent-train sample MODEL`: a sampler for another program, over standard input and output. What is said is
//! described, and its types are, in `cuda_agent_agent::policy::child`.

use std::io::{BufRead, Write};
use std::sync::{Mutex, PoisonError};

use cuda_agent_agent::policy::child::{FromSampler, Ready, SampleAnswer, SampleError, SampleRequest, ToSampler};
use cuda_agent_agent::policy::{Finish as Reason, Sampling};
use serde_json::{Map, Value, json};

use crate::TrainError;
use crate::sampler::open::Arguments;
use crate::sampler::{Finish, Request, Sample, SampleKey, Sampler, Settings};
use crate::text::{Begin, Tokenizer};

/// The program: arguments as [`Arguments::parse`] reads them. Returns when standard input ends and all is answered.
pub fn main(arguments: &[String]) -> Result<(), TrainError> {
    let arguments = Arguments::parse(arguments)?;
    arguments.expect_no_others()?;
    let (sampler, tokenizer) = arguments.open()?;
    serve(&sampler, &tokenizer, &arguments.name(), std::io::stdin().lock(), std::io::stdout())
}

/// Answers the requests of `input`, in whatever order they are done. Fails on a line that is none of the protocol's, and
/// where `output` can't be written to.
pub fn serve(
    sampler: &Sampler,
    tokenizer: &Tokenizer,
    model: &str,
    input: impl BufRead,
    output: impl Write + Send,
) -> Result<(), TrainError> {
    let output = Mutex::new(output);
    let ready = Ready { model: model.to_owned(), width: sampler.options().slots };
    write(&output, &FromSampler::Ready(ready))?;
    std::thread::scope(|scope| {
        for line in input.lines() {
            let line = line.map_err(|error| TrainError::new(format!("standard input: {error}")))?;
            let ToSampler::Request(request) = serde_json::from_str(&line)
                .map_err(|error| TrainError::new(format!("standard input: not a request: {error}")))?;
            let output = &output;
            // A caller keeps at most as many unanswered as `ready` says, so there are no more threads than slots.
            scope.spawn(move || {
                let id = request.id;
                let line = match answer(sampler, tokenizer, &request) {
                    Ok(answer) => FromSampler::Answer(answer),
                    Err(error) => FromSampler::Error(SampleError { id, message: error.to_string() }),
                };
                // Who doesn't read any more has closed standard input too, and that ends the program.
                let _unread = write(output, &line);
            });
        }
        Ok(())
    })
}

fn write(output: &Mutex<impl Write>, line: &FromSampler) -> Result<(), TrainError> {
    let text = serde_json::to_string(line).expect("JSON has no error");
    let mut output = output.lock().unwrap_or_else(PoisonError::into_inner);
    let written = writeln!(output, "{text}").and_then(|()| output.flush());
    written.map_err(|error| TrainError::new(format!("standard output: {error}")))
}

pub(crate) fn answer(
    sampler: &Sampler,
    tokenizer: &Tokenizer,
    request: &SampleRequest,
) -> Result<SampleAnswer, TrainError> {
    let messages: Vec<Value> = request.messages.iter().map(|message| json!(message)).collect();
    let ids: Option<Vec<i64>> =
        request.prefix.as_ref().map(|prefix| prefix.ids.iter().copied().map(i64::from).collect());
    let begin = match (&request.prefix, &ids) {
        (Some(prefix), Some(ids)) => Some(Begin { ids, messages: prefix.messages }),
        _ => None,
    };
    let prompt = tokenizer.prompt(&messages, begin, &Map::new())?;
    let settings = settings(&request.sampling, sampler, tokenizer, prompt.len())?;
    let key = SampleKey(request.key.bits());
    let sample = sampler.submit(Request { prompt: prompt.clone(), key, settings }).wait()?;
    Ok(SampleAnswer {
        id: request.id,
        prompt_ids: narrow(&prompt),
        token_ids: narrow(&sample.tokens),
        log_probs: sample.log_probabilities.iter().copied().map(f64::from).collect(),
        finish_reason: reason(&sample),
        text: sample.text,
    })
}

/// Ids of a vocabulary, which are checked to be in it.
fn narrow(ids: &[i64]) -> Vec<u32> {
    ids.iter().map(|&id| id as u32).collect()
}

fn reason(sample: &Sample) -> Reason {
    match sample.finish {
        Finish::End | Finish::Stop => Reason::Stop,
        Finish::Length => Reason::Length,
    }
}

/// The sampler's settings; new tokens are at most as many as there is room for.
fn settings(
    sampling: &Sampling,
    sampler: &Sampler,
    tokenizer: &Tokenizer,
    prompt: usize,
) -> Result<Settings, TrainError> {
    let capacity = sampler.options().capacity as usize;
    let room = capacity.saturating_sub(prompt);
    if room == 0 {
        return Err(TrainError::new(format!("the prompt has {prompt} tokens, and a conversation at most {capacity}")));
    }
    Ok(Settings {
        temperature: sampling.temperature,
        top_p: sampling.top_p,
        top_k: sampling.top_k.unwrap_or(0) as usize,
        max_tokens: (sampling.max_tokens as usize).min(room),
        stop: sampling.stop.clone(),
        ends: tokenizer.ends().to_vec(),
    })
}
