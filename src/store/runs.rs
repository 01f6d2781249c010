//! What is known of runs: manifests, logs, and the tags that people give to results.

use bytes::Bytes;
use futures::{Stream, StreamExt};

use super::{LAYOUT, RunManifest, Store, StoreError, Tag};
use crate::name::{TAG_PARTS, is_tag_part};

impl Store {
    /// Writes a run's manifest.
    pub async fn put_run(&self, run: &RunManifest) -> Result<(), StoreError> {
        let name = format!("{LAYOUT}/runs/{}", run.run);
        let bytes = Bytes::from(serde_json::to_vec(run).expect("run manifests are plain data"));
        self.local.overwrite(&name, bytes.clone()).await?;
        self.also_remotely(&name, bytes).await;
        Ok(())
    }

    /// Writes to the remote tier what is local already; where that fails, users are told, and nothing else.
    async fn also_remotely(&self, name: &str, bytes: Bytes) {
        if let Some(remote) = self.writable()
            && let Err(error) = remote.tier.overwrite(name, bytes).await
        {
            remote.warn(error.to_string());
        }
    }

    /// A run's manifest.
    pub async fn run(&self, id: &str) -> Result<Option<RunManifest>, StoreError> {
        let name = format!("{LAYOUT}/runs/{id}");
        let parse = |bytes: Option<Bytes>| -> Result<Option<RunManifest>, StoreError> {
            let Some(bytes) = bytes else { return Ok(None) };
            let run: RunManifest =
                serde_json::from_slice(&bytes).map_err(|error| self.local.error("read", &name, error))?;
            match run.run == id {
                true => Ok(Some(run)),
                false => Err(self.local.error("read", &name, format!("it is the manifest of {:?}", run.run))),
            }
        };
        let local = parse(self.local.read(&name).await?)?;
        match self.remote() {
            // One that still goes on may go on elsewhere.
            Some(remote) if local.as_ref().is_none_or(|run| run.ended_at.is_none()) => {
                Ok(parse(remote.tier.read(&name).await?)?.or(local))
            }
            _ => Ok(local),
        }
    }

    /// Removes what this machine kept of runs that gc deleted from the shared store.
    pub async fn forget_runs(&self, runs: &[String]) -> Result<(), StoreError> {
        if self.has_remote() {
            self.local.delete_all(runs.iter().map(|run| format!("{LAYOUT}/runs/{run}")).collect()).await?;
        }
        Ok(())
    }

    /// Run ids, newest first: ids start with the time.
    pub async fn runs(&self) -> Result<Vec<String>, StoreError> {
        let folder = format!("{LAYOUT}/runs");
        let mut found = self.local.list(&folder).await?;
        if let Some(remote) = self.remote() {
            found.extend(remote.tier.list(&folder).await?);
        }
        let mut names: Vec<String> = found.into_iter().map(|meta| meta.name).collect();
        names.retain(|name| !name.contains('#'));
        names.sort_unstable_by(|a, b| b.cmp(a));
        names.dedup();
        Ok(names)
    }

    /// Manifests of at most `most` runs, newest first, a few of them fetched ahead. One that cannot be read is left out.
    pub async fn manifests(&self, most: usize) -> Result<impl Stream<Item = RunManifest>, StoreError> {
        const AHEAD: usize = 16;
        let ids = self.runs().await?.into_iter().take(most);
        let reading = ids.map(move |id| async move { self.run(&id).await.ok().flatten() });
        Ok(Box::pin(futures::stream::iter(reading).buffered(AHEAD).filter_map(std::future::ready)))
    }

    /// This machine's part of the store, where it has any runs: what somebody did here is what they mean by "the last run".
    pub async fn own(&self) -> Result<Self, StoreError> {
        let nearby = self.nearby();
        Ok(if nearby.runs().await?.is_empty() { self.clone() } else { nearby })
    }

    /// Keeps what a stage printed.
    pub async fn put_log(&self, run: &str, name: &str, bytes: Bytes) -> Result<(), StoreError> {
        let name = format!("{LAYOUT}/logs/{run}/{name}");
        self.local.overwrite(&name, bytes.clone()).await?;
        self.also_remotely(&name, bytes).await;
        Ok(())
    }

    /// Shares a log that was written to the local tier directly.
    pub async fn share_log(&self, run: &str, name: &str) -> Result<(), StoreError> {
        let name = format!("{LAYOUT}/logs/{run}/{name}");
        if self.has_remote()
            && let Some(bytes) = self.local.read(&name).await?
        {
            self.also_remotely(&name, bytes).await;
        }
        Ok(())
    }

    /// What a stage printed in a run.
    pub async fn log(&self, run: &str, name: &str) -> Result<Option<Bytes>, StoreError> {
        self.read(&format!("{LAYOUT}/logs/{run}/{name}")).await
    }

    /// Reads an object that is not checked by a digest: from here, else from the remote tier.
    pub async fn read(&self, name: &str) -> Result<Option<Bytes>, StoreError> {
        match (self.local.read(name).await?, self.remote()) {
            (None, Some(remote)) => remote.tier.read(name).await,
            (local, _) => Ok(local),
        }
    }

    /// Names a record's output. What is named must be shared.
    pub async fn put_tag(&self, name: &str, tag: &str, target: &Tag) -> Result<(), StoreError> {
        if self.is_offline() || self.is_read_only() {
            let error =
                self.local.error("tag", &format!("{name}@{tag}"), "tags are for everybody, and nothing is shared now");
            return Err(StoreError { hint: Some("tag it without --offline and --read-only".into()), ..error });
        }
        let name = self.tag_name(name, tag)?;
        let bytes = Bytes::from(serde_json::to_vec(target).expect("tags are plain data"));
        if let Some(remote) = self.remote() {
            remote.tier.overwrite(&name, bytes.clone()).await?;
        }
        self.local.overwrite(&name, bytes).await
    }

    /// Where a tag lies; one that would lie elsewhere is refused.
    fn tag_name(&self, name: &str, tag: &str) -> Result<String, StoreError> {
        if is_tag_part(name) && is_tag_part(tag) {
            return Ok(format!("{LAYOUT}/tags/{name}/{tag}"));
        }
        let error = self.local.error("tag", &format!("{name}@{tag}"), "that is no NAME@TAG");
        Err(StoreError { hint: Some(TAG_PARTS.into()), ..error })
    }

    /// Every tag, as `name@tag`.
    pub async fn tags(&self) -> Result<Vec<String>, StoreError> {
        let found = self.truth().list(&format!("{LAYOUT}/tags")).await?;
        let mut names: Vec<String> = found
            .iter()
            .filter_map(|meta| meta.name.split_once('/'))
            .map(|(name, tag)| format!("{name}@{tag}"))
            .collect();
        names.sort_unstable();
        Ok(names)
    }

    /// What a tag names.
    pub async fn tag(&self, name: &str, tag: &str) -> Result<Option<Tag>, StoreError> {
        let name = self.tag_name(name, tag)?;
        let Some(bytes) = self.truth().read(&name).await? else { return Ok(None) };
        if self.has_remote() {
            self.keep_locally(&name, bytes.clone()).await;
        }
        serde_json::from_slice(&bytes).map(Some).map_err(|error| self.local.error("read", &name, error))
    }
}
