//! `decode.cu`, compiled for one model when a sampler starts, and what launches each of its kernels.

use std::sync::Arc;

use cudarc::driver::sys::CUdevice_attribute as Attribute;
use cudarc::driver::{CudaContext, CudaFunction, CudaModule, CudaStream, LaunchConfig, PushKernelArg};
use cudarc::nvrtc::{CompileError, CompileOptions, compile_ptx_with_opts};

use super::error;
use crate::TrainError;
use crate::model::Config;

const SOURCE: &str = include_str!("decode.cu");

/// Threads of `attend` and `sample`, as the source has them.
const ATTENDING: u32 = 128;
const SAMPLING: u32 = 512;

/// Heads that one block of `rotate` has.
const ROTATED: u32 = 8;

/// The kernels of one model.
pub(super) struct Kernels {
    embed: CudaFunction,
    add_norm: CudaFunction,
    rotate: CudaFunction,
    attend: CudaFunction,
    combine: CudaFunction,
    gated: CudaFunction,
    sample: CudaFunction,
    heads: u32,
    groups: u32,
    width: u32,
    inner: u32,
    hidden: u32,
}

impl Kernels {
    /// Compiles the source, a second or two.
    pub fn new(context: &Arc<CudaContext>, config: &Config) -> Result<Self, TrainError> {
        let attribute = |which| context.attribute(which).map_err(error);
        let major = attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?;
        let minor = attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?;
        let ptx =
            compile_ptx_with_opts(SOURCE, compile_options(config, major * 10 + minor)).map_err(
                |failed| match failed {
                    CompileError::CompileError { log, .. } => error(log.to_string_lossy()),
                    other => error(format!("NVRTC: {other:?}")),
                },
            )?;
        let module = context.load_module(ptx).map_err(error)?;
        let size = |size: i64| u32::try_from(size).map_err(error);
        Ok(Self {
            embed: function(&module, "embed")?,
            add_norm: function(&module, "add_norm")?,
            rotate: function(&module, "rotate")?,
            attend: function(&module, "attend")?,
            combine: function(&module, "combine")?,
            gated: function(&module, "gated")?,
            sample: function(&module, "sample")?,
            heads: size(config.heads)?,
            groups: size(config.key_value_heads)?,
            width: size(config.head_width)?,
            inner: size(config.intermediate)?,
            hidden: size(config.hidden)?,
        })
    }

    /// `[embedding, tokens, positions, hidden]`.
    pub fn embed(&self, stream: &Arc<CudaStream>, rows: u32, arguments: [u64; 4]) -> Result<(), TrainError> {
        launch(stream, &self.embed, ((rows, 1, 1), (self.threads(), 1, 1)), &arguments, &[], None)
    }

    /// `[hidden, delta or 0, weight, normed]`, and a bias with where it is written and how wide that is.
    pub fn add_norm(
        &self,
        stream: &Arc<CudaStream>,
        rows: u32,
        [hidden, delta, weight, normed]: [u64; 4],
        bias: Option<(u64, u64, i64)>,
    ) -> Result<(), TrainError> {
        let (bias, out, width) = bias.unwrap_or((0, 0, 0));
        let arguments = [hidden, delta, weight, normed, bias, out];
        launch(stream, &self.add_norm, ((rows, 1, 1), (self.threads(), 1, 1)), &arguments, &[width as i32], None)
    }

    /// `[projected, positions, cosines, sines, query_norm, key_norm, queries, keys, values]`.
    pub fn rotate(
        &self,
        stream: &Arc<CudaStream>,
        rows: u32,
        arguments: [u64; 9],
        capacity: i32,
    ) -> Result<(), TrainError> {
        let blocks = (self.heads + 2 * self.groups).div_ceil(ROTATED);
        launch(stream, &self.rotate, ((rows, blocks, 1), (32, ROTATED, 1)), &arguments, &[capacity], None)
    }

    /// `[queries, keys, values, positions, attended, parts]`, with capacity, splits and the scale of scores.
    pub fn attend(
        &self,
        stream: &Arc<CudaStream>,
        rows: u32,
        arguments: [u64; 6],
        (capacity, splits, scale): (i32, i32, f32),
    ) -> Result<(), TrainError> {
        let blocks = ((self.groups, rows, splits as u32), (ATTENDING, 1, 1));
        launch(stream, &self.attend, blocks, &arguments, &[capacity, splits], Some(scale))?;
        if splits == 1 {
            return Ok(());
        }
        let [.., attended, parts] = arguments;
        let blocks = ((self.heads, rows, 1), (self.width, 1, 1));
        launch(stream, &self.combine, blocks, &[parts, attended], &[splits], Some(scale))
    }

    /// `[gate and up, inner]`.
    pub fn gated(&self, stream: &Arc<CudaStream>, rows: u32, arguments: [u64; 2]) -> Result<(), TrainError> {
        let blocks = (self.inner / 8).div_ceil(128);
        launch(stream, &self.gated, ((blocks, rows, 1), (128, 1, 1)), &arguments, &[], None)
    }

    /// `[logits, positions, temperatures, keys, counts, tokens, log_probabilities]`.
    pub fn sample(&self, stream: &Arc<CudaStream>, rows: u32, arguments: [u64; 7]) -> Result<(), TrainError> {
        launch(stream, &self.sample, ((rows, 1, 1), (SAMPLING, 1, 1)), &arguments, &[], None)
    }

    /// One a vector of eight values of a row, a whole number of warps.
    fn threads(&self) -> u32 {
        (self.hidden / 8).next_multiple_of(32).min(1024)
    }
}

fn function(module: &Arc<CudaModule>, name: &str) -> Result<CudaFunction, TrainError> {
    module.load_function(name).map_err(error)
}

/// The model's sizes as macros.
fn compile_options(config: &Config, architecture: i32) -> CompileOptions {
    let macros = [
        ("HIDDEN", config.hidden.to_string()),
        ("HEADS", config.heads.to_string()),
        ("GROUPS", config.key_value_heads.to_string()),
        ("WIDTH", config.head_width.to_string()),
        ("INNER", config.intermediate.to_string()),
        ("VOCABULARY", config.vocabulary.to_string()),
        ("EPSILON", format!("{:e}f", config.norm_epsilon)),
        ("HEAD_NORMS", i32::from(config.query_key_norm).to_string()),
    ];
    let mut options = vec![format!("--gpu-architecture=compute_{architecture}"), "--std=c++17".into()];
    options.extend(macros.map(|(name, value)| format!("-D{name}={value}")));
    CompileOptions { options, name: Some("decode.cu".into()), ..CompileOptions::default() }
}

type Blocks = ((u32, u32, u32), (u32, u32, u32));

/// Launches a kernel whose arguments are pointers, then whole numbers, then a number perhaps.
#[expect(unsafe_code, reason = "a launch of a kernel")]
fn launch(
    stream: &Arc<CudaStream>,
    function: &CudaFunction,
    (grid_dim, block_dim): Blocks,
    pointers: &[u64],
    sizes: &[i32],
    number: Option<f32>,
) -> Result<(), TrainError> {
    let mut builder = stream.launch_builder(function);
    for pointer in pointers {
        builder.arg(pointer);
    }
    for size in sizes {
        builder.arg(size);
    }
    if let Some(number) = &number {
        builder.arg(number);
    }
    // SAFETY: the pointers are those of tensors of the sizes that the source was compiled for, and outlive the step.
    unsafe { builder.launch(LaunchConfig { grid_dim, block_dim, shared_mem_bytes: 0 }) }.map_err(error)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sampler::tests::decoder;

    /// NVRTC needs no GPU. Skipped where it isn't installed.
    #[expect(unsafe_code, reason = "asks whether a library can be opened")]
    #[test]
    fn the_kernels_compile_for_heads_of_both_widths() {
        // SAFETY: it opens the library and does nothing else.
        if !unsafe { cudarc::nvrtc::sys::is_culib_present() } {
            eprintln!("skipped: NVRTC can't be opened");
            return;
        }
        for (width, norms) in [(64, true), (128, false)] {
            let mut config = decoder(1).config().clone();
            (config.hidden, config.vocabulary, config.head_width, config.query_key_norm) = (896, 151_936, width, norms);
            let compiled = compile_ptx_with_opts(SOURCE, compile_options(&config, 90));
            let ptx = compiled.unwrap().to_src();
            for kernel in ["embed", "add_norm", "rotate", "attend", "combine", "gated", "sample"] {
                assert!(ptx.contains(&format!(".entry {kernel}(")), "{kernel}");
            }
        }
    }
}
