//! Decoders in the format of Hugging Face.
