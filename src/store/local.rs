//! What a key has on this machine: looked up at once, from any thread, without a request.
//!
//! [`super::Store`] looks here first, and asks the remote tier by its own rules. Whoever looks up many keys and can leave
//! some to others takes a [`LocalView`].

use std::collections::BTreeMap;
use std::sync::Arc;

use bytes::Bytes;

use super::folder::Folder;
use super::record::{Brief, RecordId};
use super::remote_tier::Remote;
use super::{Doubt, LAYOUT, Record, StoreError, blob_name, record_name, shared_name};
use crate::artifact::{Artifact, tree};
use crate::digest::Digest;

/// What a key has in a store.
pub struct Look<R = Record> {
    /// Its newest generation; 0 where it has none.
    pub generation: u32,
    /// Its record, and an output whose blobs are not all there.
    pub record: Option<(R, Option<String>)>,
}

/// A store as far as it answers at once: what lies in its folder and, where that is in front of a remote tier, is known to
/// be there too.
pub struct LocalView {
    folder: Folder,
    remote: Option<Arc<Remote>>,
}

impl LocalView {
    pub(super) fn new(folder: Folder, remote: Option<Arc<Remote>>) -> Self {
        Self { folder: folder.held(), remote }
    }

    /// What a key has, and whether its blobs are there.
    pub fn look_up(&self, key: &Digest) -> Result<Look<Brief>, StoreError> {
        let (generation, record) = self.folder.newest_as(key, &|bytes| Brief::of_key(bytes, key))?;
        let Some(record) = record else { return Ok(Look { generation, record: None }) };
        if let Some(remote) = &self.remote {
            // What is known to be shared is shared with all its blobs; of the rest, nothing can be said here.
            return Ok(match remote.is_current(record.id(), generation) {
                true => Look { generation, record: Some((record, None)) },
                false => Look { generation: 0, record: None },
            });
        }
        let missing = self.folder.missing_output(&record.outputs)?;
        Ok(Look { generation, record: Some((record, missing)) })
    }
}

/// Reads what is stored of a record; `None` where that is damaged.
type Reader<'a, R> = dyn Fn(Bytes) -> Option<R> + 'a;

impl Folder {
    /// The newest generation of a key (0 where there is none), and its record, unless that is damaged. Generations have no
    /// holes, so the first absent one ends the search; only where the first is missing is there a listing: gc deletes from
    /// the lowest up.
    pub(super) fn newest(&self, key: &Digest) -> Result<(u32, Option<Record>), StoreError> {
        self.newest_as(key, &|bytes| Record::of_key(&bytes, key))
    }

    fn newest_as<R>(&self, key: &Digest, read: &Reader<'_, R>) -> Result<(u32, Option<R>), StoreError> {
        let mut newest = None;
        let mut generation = 1;
        while let Some(record) = self.record_as(key, generation, read)? {
            newest = Some((generation, record));
            generation += 1;
        }
        // A damaged record is no record: the stage runs again and writes the next generation.
        if let Some(newest) = newest {
            return Ok(newest);
        }
        let names = self.names(&format!("{LAYOUT}/records/{key}"))?;
        let Some(highest) = names.iter().filter_map(|name| name.parse().ok()).max() else { return Ok((0, None)) };
        Ok(self.record_as(key, highest, read)?.map_or((0, None), |record| (highest, record)))
    }

    /// Reads a record: `None` where there is none, and none in it where what is there is damaged.
    pub(super) fn record(&self, key: &Digest, generation: u32) -> Result<Option<Option<Record>>, StoreError> {
        self.record_as(key, generation, &|bytes| Record::of_key(&bytes, key))
    }

    fn record_as<R>(
        &self,
        key: &Digest,
        generation: u32,
        read: &Reader<'_, R>,
    ) -> Result<Option<Option<R>>, StoreError> {
        let mut doubt = Doubt::default();
        loop {
            let Some(bytes) = self.read_record(key, generation)? else { return Ok(None) };
            if let Some(record) = read(bytes.clone()) {
                return Ok(Some(Some(record)));
            }
            if doubt.is_damaged(self.url(), &record_name(key, generation), Digest::of_bytes(&bytes))? {
                return Ok(Some(None));
            }
        }
    }

    /// An output of a record whose blobs are not all here.
    fn missing_output(&self, outputs: &BTreeMap<String, Box<Artifact>>) -> Result<Option<String>, StoreError> {
        for (port, artifact) in outputs {
            if !self.has_artifact(artifact)? {
                return Ok(Some(port.clone()));
            }
        }
        Ok(None)
    }

    fn has_artifact(&self, artifact: &Artifact) -> Result<bool, StoreError> {
        if artifact.rows.is_some() {
            return Ok(self.blob_size(&artifact.blob)? == Some(artifact.size));
        }
        let mut blobs = vec![artifact.blob];
        blobs.extend(&artifact.parts);
        if artifact.parts.is_empty() {
            let Some(bytes) = self.blob(&artifact.blob)? else { return Ok(false) };
            let entries = tree_entries(artifact, &bytes);
            let entries = entries.map_err(|error| self.error("read", &artifact.blob.to_string(), error))?;
            blobs.extend(entries.iter().map(|entry| entry.blob));
        }
        blobs.sort_unstable();
        blobs.dedup();
        for blob in blobs {
            if self.blob_size(&blob)?.is_none() {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Reads a blob and checks it; a damaged one is removed, and counts as missing.
    fn blob(&self, digest: &Digest) -> Result<Option<bytes::Bytes>, StoreError> {
        let name = blob_name(digest);
        let Some(bytes) = self.read(&name)? else { return Ok(None) };
        if Digest::of_bytes(&bytes) == *digest {
            return Ok(Some(bytes));
        }
        self.delete(&name)?;
        Ok(None)
    }
}

/// The files of a tree, out of the list that is its blob.
pub(super) fn tree_entries(artifact: &Artifact, list: &[u8]) -> Result<Vec<tree::Entry>, String> {
    let entries = tree::from_blob(list).map_err(|error| error.to_string())?;
    match tree::digest(&entries) == artifact.digest {
        true => Ok(entries),
        false => Err("the list of a tree's files is not that of the tree".to_owned()),
    }
}

impl Remote {
    /// Whether a record is known to be here with all its blobs, and not to have been replaced since.
    pub(super) fn is_current(&self, record: RecordId<'_>, generation: u32) -> bool {
        generation >= self.replaced(record.key) && self.knows(&shared_name(record, generation))
    }
}
