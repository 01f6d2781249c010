//! What differs between stages that have a GPU and stages that have none.

use serde::{Deserialize, Serialize};

/// A kind of device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeviceKind {
    /// A stage without GPUs.
    Cpu,
    /// A stage with at least one.
    Gpu,
}

impl DeviceKind {
    /// Both.
    pub const ALL: [Self; 2] = [Self::Cpu, Self::Gpu];

    /// As manifests call it.
    pub fn word(self) -> &'static str {
        match self {
            Self::Cpu => "cpu",
            Self::Gpu => "gpu",
        }
    }

    /// The other one.
    pub fn other(self) -> Self {
        match self {
            Self::Cpu => Self::Gpu,
            Self::Gpu => Self::Cpu,
        }
    }
}

/// One value for each kind of device.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct PerDevice<T> {
    /// Of stages without GPUs.
    pub cpu: T,
    /// Of stages with GPUs.
    pub gpu: T,
}

impl<T> PerDevice<T> {
    /// A value for each.
    pub fn of(value: impl Fn(DeviceKind) -> T) -> Self {
        Self { cpu: value(DeviceKind::Cpu), gpu: value(DeviceKind::Gpu) }
    }

    /// The one of a kind of device.
    pub fn on(&self, device: DeviceKind) -> &T {
        match device {
            DeviceKind::Cpu => &self.cpu,
            DeviceKind::Gpu => &self.gpu,
        }
    }
}
