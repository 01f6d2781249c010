//! Work that a leader announces in the store, for workers to find: one object for each attempt at a stage, beside it what
//! became of an attempt that failed, and the workers' reports. What they say is JSON, and its shape is the business of
//! whoever writes and reads it. Nothing rests on these objects: a result exists when its record does.

use bytes::Bytes;

use super::{LAYOUT, Store, StoreError};
use crate::digest::Digest;

/// The name of an attempt at a stage that was announced.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct WorkName {
    /// The stage's key.
    pub key: Digest,
    /// The run that announced it.
    pub run: String,
    /// Which attempt of that run, from 1.
    pub attempt: u32,
}

impl std::fmt::Display for WorkName {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}-{}-{}", self.key, self.run, self.attempt)
    }
}

impl WorkName {
    /// Reads a name; `None` where it is none.
    pub fn parse(name: &str) -> Option<Self> {
        let (key, rest) = name.split_once('-')?;
        let (run, attempt) = rest.rsplit_once('-')?;
        let is_plain = |c: char| c.is_ascii_alphanumeric() || c == '-' || c == '.';
        let name = Self { key: key.parse().ok()?, run: run.to_owned(), attempt: attempt.parse().ok()? };
        (!run.is_empty() && run.chars().all(is_plain)).then_some(name)
    }
}

impl Store {
    /// Announces an attempt to the workers of an executor.
    pub async fn put_work(&self, executor: &str, name: &WorkName, item: Bytes) -> Result<(), StoreError> {
        self.truth().overwrite(&format!("{LAYOUT}/work/{executor}/{name}"), item).await
    }

    /// What is announced to the workers of an executor, the oldest first.
    pub async fn work(&self, executor: &str) -> Result<Vec<WorkName>, StoreError> {
        let mut found = self.truth().list(&format!("{LAYOUT}/work/{executor}")).await?;
        found.sort_by(|a, b| a.modified.total_cmp(&b.modified).then_with(|| a.name.cmp(&b.name)));
        Ok(found.iter().filter_map(|meta| WorkName::parse(&meta.name)).collect())
    }

    /// What an announcement says; `None` where it was withdrawn.
    pub async fn work_item(&self, executor: &str, name: &WorkName) -> Result<Option<Bytes>, StoreError> {
        self.truth().read(&format!("{LAYOUT}/work/{executor}/{name}")).await
    }

    /// Withdraws an announcement, and forgets how it failed.
    pub async fn end_work(&self, executor: &str, name: &WorkName) -> Result<(), StoreError> {
        self.truth().delete(&format!("{LAYOUT}/work/{executor}/{name}")).await?;
        self.truth().delete(&format!("{LAYOUT}/work-failed/{executor}/{name}")).await
    }

    /// Says how an attempt failed.
    pub async fn put_work_failure(&self, executor: &str, name: &WorkName, failure: Bytes) -> Result<(), StoreError> {
        self.truth().overwrite(&format!("{LAYOUT}/work-failed/{executor}/{name}"), failure).await
    }

    /// How an attempt failed, if it did.
    pub async fn work_failure(&self, executor: &str, name: &WorkName) -> Result<Option<Bytes>, StoreError> {
        self.truth().read(&format!("{LAYOUT}/work-failed/{executor}/{name}")).await
    }

    /// Writes a worker's report.
    pub async fn put_worker(&self, executor: &str, id: &str, report: Bytes) -> Result<(), StoreError> {
        self.truth().overwrite(&format!("{LAYOUT}/workers/{executor}/{id}"), report).await
    }

    /// Removes a worker's report.
    pub async fn remove_worker(&self, executor: &str, id: &str) -> Result<(), StoreError> {
        self.truth().delete(&format!("{LAYOUT}/workers/{executor}/{id}")).await
    }

    /// Reports of an executor's workers, the living and the dead.
    pub async fn workers(&self, executor: &str) -> Result<Vec<(String, Bytes)>, StoreError> {
        let folder = format!("{LAYOUT}/workers/{executor}");
        let mut reports = Vec::new();
        for meta in self.truth().list(&folder).await? {
            if let Some(bytes) = self.truth().read(&format!("{folder}/{}", meta.name)).await? {
                reports.push((meta.name, bytes));
            }
        }
        reports.sort_by(|a, b| a.0.cmp(&b.0));
        Ok(reports)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn name(attempt: u32) -> WorkName {
        WorkName { key: Digest([7; 32]), run: "20260131T235959.123Z-abcdef".into(), attempt }
    }

    #[test]
    fn names_read_back_and_lead_nowhere() {
        assert_eq!(WorkName::parse(&name(12).to_string()), Some(name(12)));
        let key = Digest([7; 32]);
        for bad in ["", "x", &format!("{key}"), &format!("{key}-a"), &format!("{key}-a/b-1"), &format!("{key}-a-x")] {
            assert_eq!(WorkName::parse(bad), None, "{bad}");
        }
    }

    #[tokio::test]
    async fn work_is_there_until_it_is_withdrawn() {
        let store = Store::memory();
        store.put_work("gpu", &name(1), Bytes::from_static(b"{}")).await.unwrap();
        store.put_work("other", &name(2), Bytes::from_static(b"{}")).await.unwrap();
        assert_eq!(store.work("gpu").await.unwrap(), [name(1)]);
        assert_eq!(store.work_item("gpu", &name(1)).await.unwrap().unwrap(), "{}");
        assert_eq!(store.work_failure("gpu", &name(1)).await.unwrap(), None);
        store.put_work_failure("gpu", &name(1), Bytes::from_static(b"no")).await.unwrap();
        assert_eq!(store.work_failure("gpu", &name(1)).await.unwrap().unwrap(), "no");
        store.end_work("gpu", &name(1)).await.unwrap();
        assert_eq!(store.work("gpu").await.unwrap(), []);
        assert_eq!(store.work_failure("gpu", &name(1)).await.unwrap(), None);
    }
}
