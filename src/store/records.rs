//! Records of results: the newest of a key, and publishing one; and the segments of rows that they are made of.

use std::time::Duration;

use bytes::Bytes;

use super::local::Look;
use super::record::RecordId;
use super::remote_tier::Remote;
use super::tier::Tier;
use super::{
    CONFLICTS, Commit, DELETED, Doubt, LAYOUT, Record, SegmentName, Store, StoreError, record_name, segment_name,
    shared_name,
};
use crate::digest::Digest;

impl Store {
    /// The newest record of a key.
    pub async fn record(&self, key: &Digest) -> Result<Option<(u32, Record)>, StoreError> {
        let (generation, record) = self.newest(key).await?;
        // Where a stage is looked up, its pre-image is compared; who comes by the key alone has nothing to compare.
        Ok(record.filter(Record::is_of_its_key).map(|record| (generation, record)))
    }

    /// The newest generation of a key (0 where there is none), and its record, unless that is damaged.
    pub async fn newest(&self, key: &Digest) -> Result<(u32, Option<Record>), StoreError> {
        let local = newest_in(&self.local, key, None).await?;
        let Some(remote) = self.remote() else { return Ok(local) };
        remote.catch_up().await?;
        if local.1.as_ref().is_some_and(|record| remote.is_current(record.id(), local.0)) || remote.is_absent(key) {
            return Ok(local);
        }
        // A folder that is only read may have had replacements without any announcement.
        let announced = remote.tier.folder().is_none().then(|| remote.replaced(key));
        let there = newest_in(&remote.tier, key, announced).await?;
        match &there {
            // What is here alone is shared later.
            (0, _) => {
                remote.set_absent(key, true);
                return Ok(local);
            }
            // What was made here to replace it, but could not yet, goes before it; and what is damaged there may be good here.
            (generation, found) if local.1.is_some() && local.0 >= *generation => {
                let own = local.0 > *generation && (remote.is_pending(key) || remote.is_read_only());
                if own || found.is_none() {
                    return Ok(local);
                }
            }
            _ => {}
        }
        if let (generation, Some(record)) = &there {
            remote.set_found(key);
            self.keep_locally(&record_name(key, *generation), record.to_bytes()).await;
            remove_others(&self.local, key, *generation).await?;
        }
        Ok(there)
    }

    /// What a key has, and whether its blobs are there.
    pub async fn look_up(&self, key: &Digest) -> Result<Look, StoreError> {
        let (generation, record) = self.newest(key).await?;
        let Some(record) = record else { return Ok(Look { generation, record: None }) };
        let mut missing = None;
        // What is known to be shared is shared with all its blobs.
        for (port, artifact) in record.outputs.iter().filter(|_| !self.is_trusted(record.id(), generation)) {
            if self.missing_blob(artifact).await?.is_some() {
                missing = Some(port.clone());
                break;
            }
        }
        Ok(Look { generation, record: Some((record, missing)) })
    }

    /// Whether a record that was found need not be shared: it is known to be, or there is nobody to share it with.
    pub fn is_shared(&self, record: RecordId<'_>, generation: u32) -> bool {
        self.writable().is_none() || self.is_trusted(record, generation)
    }

    /// A blob of a key's record is missing or damaged: it is looked at again before anybody trusts it.
    pub async fn distrust(&self, key: &Digest) -> Result<(), StoreError> {
        let Some(remote) = self.remote() else { return Ok(()) };
        if let (generation, Some(record)) = newest_in(&self.local, key, None).await? {
            remote.forget(&shared_name(record.id(), generation));
        }
        Ok(())
    }

    /// Makes every machine forget what it knows of the shared store, as after a gc.
    pub async fn distrust_all(&self) -> Result<(), StoreError> {
        let Some(remote) = self.writable() else { return Ok(()) };
        remote.tier.overwrite(&format!("{LAYOUT}/gc/{DELETED}{}", crate::run_id()), &b"{}"[..]).await
    }

    /// Whether a record is known to be in the remote tier, with all its blobs.
    pub fn is_trusted(&self, record: RecordId<'_>, generation: u32) -> bool {
        self.remote().is_some_and(|remote| remote.knows(&shared_name(record, generation)))
    }

    /// Publishes a record as the generation after `after`. Whoever loses the race gets the winner's record. Where the remote
    /// tier cannot be written, the record stays local, and [`Remote::unshared`] has it.
    pub async fn commit(&self, record: Record, after: u32) -> Result<Commit, StoreError> {
        let Some(remote) = self.writable() else { return commit_in(&self.local, None, record, after).await };
        match self.share(record.clone(), after + 1).await {
            Ok(commit) => {
                remote.set_shared(&record.key);
                Ok(commit)
            }
            Err(error) => {
                remote.set_unshared(&record.key, &error);
                self.local.overwrite(&record_name(&record.key, after + 1), record.to_bytes()).await?;
                Ok(Commit { generation: after + 1, record, ours: true })
            }
        }
    }

    /// Row segments of a base key, those that win first.
    pub async fn segments(&self, base: &Digest) -> Result<Vec<SegmentName>, StoreError> {
        let folder = format!("{LAYOUT}/rows/{base}");
        let mut names = self.local.list(&folder).await?;
        if let Some(remote) = self.remote() {
            let there = remote.tier.list(&folder).await?;
            there.iter().for_each(|meta| remote.add_known(&format!("{folder}/{}", meta.name)));
            names.extend(there);
        }
        let mut segments: Vec<SegmentName> =
            names.iter().filter_map(|meta| SegmentName::parse(meta.name.strip_suffix(".parquet")?)).collect();
        segments.sort_unstable();
        segments.dedup();
        Ok(segments)
    }

    /// Reads a row segment and checks it; `None` where it is gone or damaged.
    pub async fn segment(&self, base: &Digest, segment: &SegmentName) -> Result<Option<Bytes>, StoreError> {
        self.read_checked(&segment_name(base, segment), &segment.digest).await
    }

    /// Publishes a row segment. Where the remote tier cannot be written, it stays local until the stage's record is shared.
    pub async fn put_segment(&self, base: &Digest, epoch: u32, bytes: Bytes) -> Result<SegmentName, StoreError> {
        let segment = SegmentName { epoch, digest: Digest::of_bytes(&bytes) };
        let name = segment_name(base, &segment);
        self.local.create(&name, bytes.clone()).await?;
        if let Some(remote) = self.writable() {
            match remote.tier.overwrite(&name, bytes).await {
                // How old it is counts only for gc, which asks the server.
                Ok(()) => remote.add_known(&name),
                Err(error) => remote.warn(format!("finished rows stay on this machine for now: {error}")),
            }
        }
        Ok(segment)
    }
}

/// The newest generation of a key in a tier. Generations have no holes, so the first absent one ends the search; only where
/// the first asked for is missing is there a listing: gc deletes from the lowest up, and one that was announced may never
/// have come. In a remote tier replacements are announced, so there one question is enough, unless what is found is damaged.
pub(super) async fn newest_in(
    tier: &Tier,
    key: &Digest,
    announced: Option<u32>,
) -> Result<(u32, Option<Record>), StoreError> {
    if let (Some(folder), None) = (tier.folder(), announced) {
        return folder.newest(key);
    }
    let mut newest = None;
    let mut generation = announced.unwrap_or(1).max(1);
    while let Some(record) = read_record(tier, key, generation).await? {
        let is_good = record.is_some();
        newest = Some((generation, record));
        generation += 1;
        // One that is damaged was perhaps replaced, and the announcement is lost.
        if announced.is_some() && is_good {
            break;
        }
    }
    // A damaged record is no record: the stage runs again and writes the next generation.
    if let Some(newest) = newest {
        return Ok(newest);
    }
    let folder = format!("{LAYOUT}/records/{key}");
    let may_have_others = announced.is_none_or(|announced| announced > 1);
    if may_have_others {
        let names = tier.list(&folder).await?;
        let highest = names.iter().filter_map(|meta| meta.name.parse::<u32>().ok()).max();
        if let Some(highest) = highest {
            newest = read_record(tier, key, highest).await?.map(|record| (highest, record));
        }
    }
    Ok(newest.unwrap_or((0, None)))
}

/// Reads a record: `None` where there is none, and none in it where what is there is damaged.
async fn read_record(tier: &Tier, key: &Digest, generation: u32) -> Result<Option<Option<Record>>, StoreError> {
    if let Some(folder) = tier.folder() {
        return folder.record(key, generation);
    }
    let name = record_name(key, generation);
    let mut doubt = Doubt::default();
    loop {
        let Some(bytes) = tier.read(&name).await? else { return Ok(None) };
        let record = Record::of_key(&bytes, key);
        if record.is_some() || doubt.is_damaged(tier.url(), &name, Digest::of_bytes(&bytes))? {
            return Ok(Some(record));
        }
    }
}

/// Removes what a local tier holds of a key besides a generation.
pub(super) async fn remove_others(tier: &Tier, key: &Digest, generation: u32) -> Result<(), StoreError> {
    let folder = format!("{LAYOUT}/records/{key}");
    for meta in tier.list(&folder).await? {
        if meta.name.parse::<u32>().is_ok_and(|other| other != generation) {
            tier.delete(&format!("{folder}/{}", meta.name)).await?;
        }
    }
    Ok(())
}

/// Publishes a record in a tier as the generation after `after`; whoever loses the race gets the winner's record. In a remote
/// tier, replacements are announced before they come.
pub(super) async fn commit_in(
    tier: &Tier,
    remote: Option<&Remote>,
    record: Record,
    after: u32,
) -> Result<Commit, StoreError> {
    let bytes = record.to_bytes();
    let mut generation = after + 1;
    let mut conflicts = 0;
    loop {
        if let Some(remote) = remote
            && generation > 1
            && remote.replaced(&record.key) < generation
        {
            remote.announce(&record.key, generation).await?;
        }
        let name = record_name(&record.key, generation);
        if tier.create(&name, bytes.clone()).await? {
            return Ok(Commit { generation, record, ours: true });
        }
        match read_record(tier, &record.key, generation).await? {
            Some(Some(other)) => {
                let ours = other.nonce == record.nonce;
                return Ok(Commit { generation, record: other, ours });
            }
            // Damaged: it can never be read again, so go past it.
            Some(None) => generation += 1,
            None if conflicts == CONFLICTS => {
                return Err(tier.error(
                    "write",
                    &name,
                    "the server reports a conflict with an object that is not there",
                ));
            }
            None => {
                tokio::time::sleep(Duration::from_millis(20 << conflicts)).await;
                conflicts += 1;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::ahead::tests::record;

    #[tokio::test]
    async fn a_damaged_record_is_passed_by_where_its_replacement_was_not_announced() {
        let (tier, record) = (Tier::memory(), record("makes", Digest::of_bytes(b"table")));
        let name = |generation| record_name(&record.key, generation);
        assert_eq!(newest_in(&tier, &record.key, Some(0)).await.unwrap(), (0, None));
        assert!(tier.create(&name(1), &b"no record"[..]).await.unwrap());
        assert_eq!(newest_in(&tier, &record.key, Some(0)).await.unwrap(), (1, None));
        assert!(tier.create(&name(2), record.to_bytes()).await.unwrap());
        for announced in [0, 2] {
            let found = newest_in(&tier, &record.key, Some(announced)).await.unwrap();
            assert_eq!(found, (2, Some(record.clone())), "announced: {announced}");
        }
    }
}
