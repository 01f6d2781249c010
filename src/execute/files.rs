//! How files look that programs see.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use crate::artifact::ArtifactError;

/// Of a file's mode only whether its owner may execute it counts, so that is all that a program sees of it.
pub fn set_mode(path: &Path, executable: bool) -> Result<(), ArtifactError> {
    let mode = fs::Permissions::from_mode(if executable { 0o755 } else { 0o644 });
    fs::set_permissions(path, mode).map_err(ArtifactError::io(path))
}
