//! Tests of whole files.
