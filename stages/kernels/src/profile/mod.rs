//! From times of trials to a speed-up with an interval, and what the device's limits allow at best.

pub mod roofline;
pub mod trials;
