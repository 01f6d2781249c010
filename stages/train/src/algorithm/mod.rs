//! The mathematics of training, apart from any model.
