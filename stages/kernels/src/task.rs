//! What the trusted process says of a task: the tensors that a candidate takes and gives, and their sizes.

use serde::{Deserialize, Serialize};

/// An element type that a candidate can be given.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum DataType {
    /// `bool`, one byte.
    Bool,
    /// `unsigned char`.
    Uint8,
    /// `signed char`.
    Int8,
    /// `short`.
    Int16,
    /// `int`.
    Int32,
    /// `long long`.
    Int64,
    /// `__half`.
    Float16,
    /// `__nv_bfloat16`.
    Bfloat16,
    /// `float`.
    Float32,
    /// `double`.
    Float64,
}

impl DataType {
    /// The type's name in CUDA C++.
    pub fn cuda(self) -> &'static str {
        match self {
            Self::Bool => "bool",
            Self::Uint8 => "unsigned char",
            Self::Int8 => "signed char",
            Self::Int16 => "short",
            Self::Int32 => "int",
            Self::Int64 => "long long",
            Self::Float16 => "__half",
            Self::Bfloat16 => "__nv_bfloat16",
            Self::Float32 => "float",
            Self::Float64 => "double",
        }
    }

    /// Bytes of one element.
    pub fn bytes(self) -> u64 {
        match self {
            Self::Bool | Self::Uint8 | Self::Int8 => 1,
            Self::Int16 | Self::Float16 | Self::Bfloat16 => 2,
            Self::Int32 | Self::Float32 => 4,
            Self::Int64 | Self::Float64 => 8,
        }
    }
}

/// One tensor, contiguous.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Tensor {
    /// As in `forward`, `named_parameters()` or `named_buffers()`; outputs are `out`, or `out0`, `out1`, … where there are several.
    pub name: String,
    /// Sizes, outermost first; empty for a scalar tensor.
    pub shape: Vec<u64>,
    /// Its element type.
    pub dtype: DataType,
}

impl Tensor {
    /// How many elements it holds.
    pub fn elements(&self) -> u64 {
        self.shape.iter().product()
    }

    /// How many bytes it takes.
    pub fn bytes(&self) -> u64 {
        self.elements() * self.dtype.bytes()
    }
}

/// A number that the task's file or its arguments fix.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Constant {
    /// A module constant, an argument of `__init__`, or a non-tensor argument of `forward`.
    pub name: String,
    /// Its value: a boolean, an integer or a finite float.
    pub value: serde_json::Value,
}

/// The contract between a task and its candidates.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TaskSpec {
    /// Tensors in the order of `forward`.
    pub inputs: Vec<Tensor>,
    /// In the order of `named_parameters()`.
    pub parameters: Vec<Tensor>,
    /// In the order of `named_buffers()`.
    pub buffers: Vec<Tensor>,
    /// In the order of the returned tuple.
    pub outputs: Vec<Tensor>,
    /// Numbers, in order of appearance; names are unique.
    pub constants: Vec<Constant>,
    /// Floating-point operations of one forward, as torch's counter has them (matrix products and convolutions: 2 a multiply-add)
    /// plus one for each element that any other operator writes.
    pub flops: u64,
    /// The fewest bytes that one forward moves: every input, parameter and buffer read once, every output written once.
    pub bytes: u64,
}

impl TaskSpec {
    /// The tensors that a candidate reads, in the order of its arguments.
    pub fn read(&self) -> impl Iterator<Item = &Tensor> {
        self.inputs.iter().chain(&self.parameters).chain(&self.buffers)
    }
}
