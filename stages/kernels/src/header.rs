//! `task.h`: what a candidate is told of its task, as C++17 that NVRTC, nvcc and g++ read alike.
//!
//! The text depends on the task alone. What it holds: sizes and constants in the namespace `task`, the argument list as
//! macros, and the two declarations that a candidate makes at file scope, `TASK_LAUNCH` and `TASK_SCRATCH`. On the GPU these
//! make constant objects that the compile step reads out of the machine code (`compile/cubin.rs`); on the CPU device the
//! header `cuda_cpu.h` defines both before this one is read.

use std::collections::HashSet;
use std::fmt::Write;

use crate::task::{DataType, TaskSpec, Tensor};

/// The macros' machinery: the same for every task.
const MACHINERY: &str =
    concat!(include_str!("../../sandbox/src/launch_limits.h"), include_str!("../headers/task_machinery.h"));

/// What a tensor's name is extended by in the namespace `task`.
const DERIVED: [&str; 3] = ["_shape", "_size", "_rank"];

/// Words that a tensor or a constant must not be called: C++ keywords, names that CUDA gives a meaning in device code, macros
/// of the usual headers, and the names of `launch`'s own parameters.
const RESERVED: &str = "alignas alignof and and_eq asm auto bitand bitor bool break case catch char char8_t char16_t char32_t \
    class compl concept const consteval constexpr constinit const_cast continue co_await co_return co_yield decltype default \
    delete do double dynamic_cast else enum explicit export extern false float for friend goto if inline int long mutable \
    namespace new noexcept not not_eq nullptr operator or or_eq private protected public register reinterpret_cast requires \
    return short signed sizeof static static_assert static_cast struct switch template this thread_local throw true try \
    typedef typeid typename union unsigned using virtual void volatile wchar_t while xor xor_eq typeof \
    threadIdx blockIdx blockDim gridDim warpSize dim3 task task_internal launch scratch stream \
    assert errno signbit isnan isinf isfinite isnormal fpclassify NULL EOF INFINITY NAN HUGE_VAL BUFSIZ RAND_MAX EDOM ERANGE \
    EILSEQ stdin stdout stderr linux unix i386 offsetof va_start va_arg va_end va_copy setjmp near far";

/// The same for families of macros: limits, mathematical constants, this header's own.
const RESERVED_PREFIXES: [&str; 18] = [
    "TASK_", "CUDA", "FLT_", "DBL_", "LDBL_", "INT_", "INT8", "INT16", "INT32", "INT64", "UINT", "LONG_", "LLONG_",
    "CHAR_", "SHRT_", "SIZE_", "M_", "FP_",
];

/// Generates `task.h`.
pub fn task_header(spec: &TaskSpec) -> String {
    let mut names = Names::default();
    let arguments = arguments(spec, &mut names);
    let mut text = String::from(
        "// The task: its tensors in the order of the arguments, its constants, and how to declare launches.\n",
    );
    text.push_str("#ifndef TASK_H\n#define TASK_H\n");
    text.push_str(&type_headers(&arguments));
    text.push_str(TABLE);
    text.push_str(&namespace(spec, &arguments, &mut names));
    text.push('\n');
    text.push_str(&macros(&arguments));
    text.push_str(MACHINERY);
    text.push_str("#endif\n");
    text
}

/// The part of `task.h` that is the task's own, as a prompt shows it: sizes, constants, and the list of parameters.
pub fn contract(spec: &TaskSpec) -> String {
    let mut names = Names::default();
    let arguments = arguments(spec, &mut names);
    let namespace = namespace(spec, &arguments, &mut names).replace("TASK_TABLE ", "constexpr ");
    format!("{namespace}#define TASK_PARAMETERS {}\n", parameters(&arguments))
}

fn namespace(spec: &TaskSpec, arguments: &[Argument], names: &mut Names) -> String {
    let mut text = String::from("namespace task {\n");
    for (position, argument) in arguments.iter().enumerate() {
        text.push_str(&argument.declarations(position + 1));
    }
    for constant in &spec.constants {
        let wide = arguments.iter().any(|argument| argument.tensor.dtype == DataType::Float64);
        text.push_str(&constant_declaration(&names.claim(&constant.name, &[""]), &constant.value, wide));
    }
    text + "}\n"
}

/// What messages call the arguments of a candidate of this task: `const float* x, float* out`.
pub fn parameter_list(spec: &TaskSpec) -> String {
    parameters(&arguments(spec, &mut Names::default()))
}

/// The steps of a forward (`python/steps.py`) with the arguments' names for `$0`, `$1`, …, a line for each.
pub fn steps(spec: &TaskSpec, lines: &[String]) -> String {
    let arguments = arguments(spec, &mut Names::default());
    let named = |line: &String| {
        let mut parts = line.split('$');
        let mut text = parts.next().unwrap_or_default().to_owned();
        for part in parts {
            let digits = part.chars().take_while(char::is_ascii_digit).count();
            let argument = part[..digits].parse::<usize>().ok().and_then(|number| arguments.get(number));
            text += argument.map_or("?", |argument| &argument.name);
            text += &part[digits..];
        }
        text
    };
    lines.iter().map(named).collect::<Vec<_>>().join("\n")
}

/// Tables that device code indexes at run time must be device memory where nvcc compiles for the device, and host memory
/// where it compiles for the host.
const TABLE: &str = "#if defined(__CUDA_ARCH__) && !defined(__CUDACC_RTC__)
#define TASK_TABLE __device__ constexpr
#else
#define TASK_TABLE constexpr
#endif

";

/// One tensor as an argument.
struct Argument<'a> {
    tensor: &'a Tensor,
    name: String,
    derived: String,
    written: bool,
}

impl Argument<'_> {
    fn pointer(&self) -> String {
        format!("{}{}*", if self.written { "" } else { "const " }, self.tensor.dtype.cuda())
    }

    fn parameter(&self) -> String {
        format!("{} {}", self.pointer(), self.name)
    }

    fn declarations(&self, position: usize) -> String {
        let Self { tensor, name, derived, .. } = self;
        let shape = tensor.shape.iter().map(u64::to_string).collect::<Vec<_>>().join(", ");
        let use_of = if self.written { "written" } else { "read" };
        let mut text = format!("// {name}: {} [{shape}], argument {position}, {use_of}\n", tensor.dtype.cuda());
        if !tensor.shape.is_empty() {
            let _ = writeln!(text, "TASK_TABLE long long {derived}_shape[] = {{{shape}}};");
        }
        let _ = writeln!(text, "constexpr long long {derived}_size = {};", tensor.elements());
        let _ = writeln!(text, "constexpr int {derived}_rank = {};", tensor.shape.len());
        text
    }
}

fn arguments<'a>(spec: &'a TaskSpec, names: &mut Names) -> Vec<Argument<'a>> {
    let read = spec.read().map(|tensor| (tensor, false));
    let written = spec.outputs.iter().map(|tensor| (tensor, true));
    let mut parameters = Names::default();
    read.chain(written)
        .map(|(tensor, written)| {
            let name = parameters.claim(&tensor.name, &[""]);
            let derived = names.claim(&name, &DERIVED);
            Argument { tensor, name, derived, written }
        })
        .collect()
}

fn parameters(arguments: &[Argument]) -> String {
    arguments.iter().map(Argument::parameter).collect::<Vec<_>>().join(", ")
}

fn macros(arguments: &[Argument]) -> String {
    let parameters = parameters(arguments);
    let names = arguments.iter().map(|argument| argument.name.as_str()).collect::<Vec<_>>().join(", ");
    let types = arguments.iter().map(Argument::pointer).collect::<Vec<_>>().join(", ");
    let casts: Vec<String> = arguments
        .iter()
        .enumerate()
        .map(|(index, argument)| format!("({})(of)[{index}]", argument.pointer()))
        .collect();
    let (casts, count) = (casts.join(", "), arguments.len());
    format!(
        "#define TASK_PARAMETERS {parameters}\n#define TASK_ARGUMENTS {names}\n\
         #define TASK_PARAMETER_TYPES {types}\n#define TASK_PARAMETERS_TEXT \"({parameters})\"\n\
         #define TASK_ARGUMENTS_OF(of) {casts}, (of)[{count}]\n\n"
    )
}

fn type_headers(arguments: &[Argument]) -> String {
    let has = |dtype| arguments.iter().any(|argument| argument.tensor.dtype == dtype);
    let mut text = String::new();
    for (dtype, header) in [(DataType::Float16, "cuda_fp16.h"), (DataType::Bfloat16, "cuda_bf16.h")] {
        if has(dtype) {
            let _ = writeln!(text, "#include <{header}>");
        }
    }
    text
}

fn constant_declaration(name: &str, value: &serde_json::Value, wide: bool) -> String {
    match value {
        serde_json::Value::Bool(value) => format!("constexpr bool {name} = {value};\n"),
        serde_json::Value::Number(number) => number_declaration(name, number, wide),
        other => format!("// {name} = {} is no number.\n", other.to_string().replace(['\n', '\\'], " ")),
    }
}

fn number_declaration(name: &str, number: &serde_json::Number, wide: bool) -> String {
    if let Some(value) = number.as_i64() {
        return integer_declaration(name, value);
    }
    if let Some(value) = number.as_u64() {
        return format!("constexpr unsigned long long {name} = {value}ULL;\n");
    }
    let value = number.as_f64().unwrap_or(0.0);
    if !wide && writes_alike(value) {
        return format!("constexpr float {name} = {}f;\n", float_text(value));
    }
    format!("constexpr double {name} = {};\n", float_text(value))
}

fn integer_declaration(name: &str, value: i64) -> String {
    match i32::try_from(value) {
        Ok(value) => format!("constexpr int {name} = {value};\n"),
        // The literal 9223372036854775808 has no signed type, so the least number can't be written as one.
        Err(_) if value == i64::MIN => format!("constexpr long long {name} = -9223372036854775807LL - 1;\n"),
        Err(_) => format!("constexpr long long {name} = {value}LL;\n"),
    }
}

/// Whether `float` keeps what was written: 1e-5 is no float exactly, but it is the shortest text of one, and a `double` in the
/// header would make kernels compute in double precision unasked.
fn writes_alike(value: f64) -> bool {
    let narrow = value as f32;
    narrow.is_finite() && (f64::from(narrow) == value || narrow.to_string().parse() == Ok(value))
}

fn float_text(value: f64) -> String {
    format!("{value:?}")
}

/// Names that are taken, in one scope.
#[derive(Default)]
struct Names {
    taken: HashSet<String>,
}

impl Names {
    /// Makes a name safe and unique together with each of its extensions.
    fn claim(&mut self, raw: &str, extensions: &[&str]) -> String {
        let mut name = identifier(raw);
        let free = |names: &Self, name: &str| {
            extensions.iter().all(|extension| {
                let full = format!("{name}{extension}");
                !is_reserved(&full) && !names.taken.contains(&full)
            })
        };
        while !free(self, &name) {
            name.push('_');
        }
        self.taken.extend(extensions.iter().map(|extension| format!("{name}{extension}")));
        name
    }
}

fn is_reserved(name: &str) -> bool {
    // With the underscore that sets a name apart, at its end or before an extension, it is no longer one of a family's.
    let set_apart = name.ends_with('_') || name.contains("__");
    let in_family = !set_apart && RESERVED_PREFIXES.iter().any(|prefix| name.starts_with(prefix));
    in_family || RESERVED.split_whitespace().any(|word| word == name)
}

/// Dots and whatever else C++ has no letters for become underscores; two leading ones belong to the compiler.
fn identifier(raw: &str) -> String {
    let letters = |character: char| if character.is_ascii_alphanumeric() { character } else { '_' };
    let name: String = raw.chars().map(letters).collect();
    let name = if name.starts_with("__") { format!("_{}", name.trim_start_matches('_')) } else { name };
    let starts_badly = name.is_empty() || name.starts_with(|first: char| first.is_ascii_digit());
    if starts_badly { format!("_{name}") } else { name }
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use proptest::prelude::*;
    use proptest::strategy::ValueTree;
    use proptest::test_runner::TestRunner;

    use super::*;
    use crate::task::Constant;

    fn tensor(name: &str, shape: &[u64], dtype: DataType) -> Tensor {
        Tensor { name: name.to_owned(), shape: shape.to_vec(), dtype }
    }

    fn linear() -> TaskSpec {
        let constant = |name: &str, value| Constant { name: name.to_owned(), value };
        TaskSpec {
            inputs: vec![tensor("x", &[64, 1000], DataType::Float32), tensor("scale", &[], DataType::Float16)],
            parameters: vec![tensor("fc.weight", &[10, 1000], DataType::Float32)],
            buffers: vec![tensor("fc_weight", &[3], DataType::Int64)],
            outputs: vec![tensor("out", &[64, 10], DataType::Float32)],
            constants: vec![
                constant("batch", serde_json::json!(64)),
                constant("eps", serde_json::json!(1e-5)),
                constant("pi", serde_json::json!(std::f64::consts::PI)),
                constant("half", serde_json::json!(0.5)),
                constant("large", serde_json::json!(1e300)),
                constant("tokens", serde_json::json!(5_000_000_000_i64)),
                constant("causal", serde_json::json!(true)),
                constant("x_size", serde_json::json!(7)),
                constant("double", serde_json::json!(-3)),
            ],
            flops: 0,
            bytes: 0,
        }
    }

    #[test]
    fn the_header_of_a_task() {
        let header = task_header(&linear());
        assert!(header.contains(MACHINERY));
        insta::assert_snapshot!(header.replace(MACHINERY, "// (the macros' machinery)\n"));
    }

    #[test]
    fn steps_have_the_arguments_names() {
        let lines =
            ["t1[i] = $0[i] * $2[i / 10] - $1[0];  // i < 5".to_owned(), "$4[i] = t1[i] + $3[i % 3];".to_owned()];
        insta::assert_snapshot!(steps(&linear(), &lines), @r"
        t1[i] = x[i] * fc_weight[i / 10] - scale[0];  // i < 5
        out[i] = t1[i] + fc_weight_[i % 3];
        ");
    }

    #[test]
    fn floats_stay_what_was_written() {
        for (value, kept) in [(1e-5, true), (0.1, true), (0.5, true), (1e300, false), (1e-60, false), (0.0, true)] {
            assert_eq!(writes_alike(value), kept, "{value}");
        }
        assert!(!writes_alike(std::f64::consts::PI));
        assert!(!writes_alike(16_777_217.0), "the next whole number is no float");
    }

    fn any_tensor() -> impl Strategy<Value = Tensor> {
        use DataType::*;
        let dtype = prop::sample::select(vec![Bool, Uint8, Int8, Int16, Int32, Int64, Float32, Float64]);
        // Few letters and words, so that clashes are common.
        let name = prop_oneof!["[a-b._]{0,3}", "(x|int|x_size|_shape|__LINE__|INT_MAX|TASK_H|1|out|scratch|é|a-b)"];
        (name, prop::collection::vec(0..5_u64, 0..4), dtype).prop_map(|(name, shape, dtype)| Tensor {
            name,
            shape,
            dtype,
        })
    }

    fn any_constant() -> impl Strategy<Value = serde_json::Value> {
        prop_oneof![
            any::<bool>().prop_map(serde_json::Value::from),
            any::<i64>().prop_map(serde_json::Value::from),
            any::<u64>().prop_map(serde_json::Value::from),
            (-40_i32..40).prop_map(serde_json::Value::from),
            any::<f64>().prop_filter("finite", |value| value.is_finite()).prop_map(serde_json::Value::from),
        ]
    }

    prop_compose! {
        fn any_spec()(
            tensors in prop::collection::vec(any_tensor(), 1..7),
            values in prop::collection::vec(("(x|x_size|eps|and|N|NULL|M_PI|task|[a-b_]{1,2})", any_constant()), 0..6),
        ) -> TaskSpec {
            let mut tensors = tensors;
            let outputs = vec![tensors.remove(0)];
            let parameters = tensors.split_off(tensors.len() / 2);
            let constants = values.into_iter().map(|(name, value)| Constant { name, value }).collect();
            TaskSpec { inputs: tensors, parameters, buffers: Vec::new(), outputs, constants, flops: 0, bytes: 0 }
        }
    }

    /// Forty tasks in one file, each in a namespace: g++ takes them all, and a kernel with the header's own parameters fits.
    #[test]
    fn any_task_has_a_header_that_compiles() {
        let mut runner = TestRunner::deterministic();
        let mut text = String::from(
            "#include <math.h>\n#include <limits.h>\n#include <stdio.h>\n#define TASK_LAUNCH(...)\n#define TASK_SCRATCH(...)\n",
        );
        for number in 0..40 {
            let spec = any_spec().new_tree(&mut runner).unwrap().current();
            let undefine = "#undef TASK_H\n#undef TASK_TABLE\n#undef TASK_BOTH\n#undef TASK_PARAMETERS\n#undef TASK_ARGUMENTS\n\
                #undef TASK_PARAMETER_TYPES\n#undef TASK_PARAMETERS_TEXT\n#undef TASK_CHECK_KERNEL\n#undef TASK_JOIN_TEXT\n#undef TASK_JOIN\n";
            let _ = writeln!(text, "namespace n{number} {{\n{}", task_header(&spec));
            let _ = writeln!(text, "void k(TASK_PARAMETERS);\nTASK_CHECK_KERNEL(k);");
            let _ = writeln!(text, "void s(TASK_PARAMETERS, float*);\nTASK_CHECK_KERNEL(s);");
            let _ = writeln!(text, "void pass(TASK_PARAMETERS) {{ k(TASK_ARGUMENTS); }}");
            let _ = writeln!(text, "static_assert(!task_internal::Kernel<void(int)>::fits, \"\");\n}}\n{undefine}");
        }
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("all.cpp");
        std::fs::write(&file, text).unwrap();
        let output =
            Command::new("g++").args(["-std=c++17", "-Wall", "-Werror=narrowing", "-fsyntax-only"]).arg(&file).output();
        let output = output.unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    }
}
