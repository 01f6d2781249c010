//! When the remote tier is asked, and what happens where it isn't or can't be: everybody else asks the store, and goes on
//! with what comes.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use super::local::LocalView;
use super::remote_tier::Remote;
use super::tier::Tier;
use super::{Store, StoreError};
use crate::digest::Digest;

/// What there is beside the local tier.
#[derive(Clone)]
pub(super) enum Sharing {
    /// Nothing, or nothing that this view of the store asks.
    None,
    /// A remote tier that is not to be asked.
    Offline,
    /// A remote tier: what counts is there.
    With(Arc<Remote>),
}

/// Objects and bytes that a process moved to and from the remote tier.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Traffic {
    /// Objects and bytes that went up.
    pub sent: (u64, u64),
    /// Objects and bytes that came down.
    pub received: (u64, u64),
}

impl Traffic {
    /// Whether nothing went or came.
    pub fn is_none(&self) -> bool {
        self.sent.0 + self.received.0 == 0
    }
}

impl Store {
    /// The remote tier, where it may be asked.
    pub fn remote(&self) -> Option<&Arc<Remote>> {
        match &self.sharing {
            Sharing::With(remote) => Some(remote),
            Sharing::None | Sharing::Offline => None,
        }
    }

    /// The remote tier, where results go there.
    pub(super) fn writable(&self) -> Option<&Arc<Remote>> {
        self.remote().filter(|remote| !remote.is_read_only())
    }

    /// The tier that counts: the remote one where there is one.
    pub fn truth(&self) -> &Tier {
        self.remote().map_or(self.local(), |remote| &remote.tier)
    }

    /// Whether an answer can take a request.
    pub fn has_remote(&self) -> bool {
        self.remote().is_some()
    }

    /// Whether there is a remote tier that is not to be asked.
    pub fn is_offline(&self) -> bool {
        matches!(self.sharing, Sharing::Offline)
    }

    /// Whether the remote tier is only read: results stay on this machine, and that is as it should be.
    pub fn is_read_only(&self) -> bool {
        self.remote().is_some_and(|remote| remote.is_read_only())
    }

    /// Whether what is made goes to others, sooner or later.
    pub fn shares_results(&self) -> bool {
        self.writable().is_some()
    }

    /// Whether what this process made is on this machine only.
    pub fn is_private(&self) -> bool {
        self.is_offline() || self.is_read_only() || !self.unshared().is_empty()
    }

    /// This store as far as it is on this machine.
    pub fn nearby(&self) -> Self {
        match self.sharing {
            Sharing::With(_) => Self { sharing: Sharing::None, ..self.clone() },
            Sharing::None | Sharing::Offline => self.clone(),
        }
    }

    /// What this machine's folder answers at once; `None` where the store is no folder and has none in front of it.
    pub fn local_view(&self) -> Option<LocalView> {
        let folder = self.local().folder()?.clone();
        Some(LocalView::new(folder, self.remote().cloned()))
    }

    /// What to go on with after an error: this machine's part, should the remote tier be away, which costs double work at
    /// worst. `None` where there is no remote tier, so that the error stands.
    pub fn without_remote(&self) -> Option<Self> {
        self.has_remote().then(|| self.nearby())
    }

    /// How long to wait before somebody else's lease is looked at again.
    pub fn lease_poll_interval(&self) -> Duration {
        match self.has_remote() {
            true => Duration::from_secs(2),
            false => Duration::from_millis(200),
        }
    }

    /// A key that was looked for in vain may have a record by now.
    pub fn forget_absence(&self, key: &Digest) {
        if let Some(remote) = self.remote() {
            remote.set_absent(key, false);
        }
    }

    /// Notes something about the remote tier that users should hear of; the same thing is told once.
    pub fn warn(&self, message: String) {
        if let Some(remote) = self.remote() {
            remote.warn(message);
        }
    }

    /// What users have not been told yet.
    pub fn take_warnings(&self) -> Vec<String> {
        self.remote().map(|remote| remote.take_warnings()).unwrap_or_default()
    }

    /// Keys whose record could not be shared yet, and why.
    pub fn unshared(&self) -> BTreeMap<Digest, StoreError> {
        self.remote().map(|remote| remote.unshared()).unwrap_or_default()
    }

    /// Tries once more to share what could not be shared when it was made; whether all is shared now.
    pub async fn share_the_rest(&self) -> bool {
        for key in self.unshared().into_keys() {
            if let Ok((generation, Some(record))) = self.nearby().newest(&key).await {
                let _ = self.offer(record, generation).await;
            }
            // The same would be said of the others.
            if self.unshared().contains_key(&key) {
                return false;
            }
        }
        true
    }

    /// Keeps what was learned of the remote tier.
    pub fn write_known(&self) {
        if let Some(remote) = self.remote() {
            remote.write_known();
        }
    }

    /// What went to the remote tier and came from it.
    pub fn traffic(&self) -> Traffic {
        self.remote().map(|remote| Traffic { sent: remote.sent(), received: remote.received() }).unwrap_or_default()
    }

    /// The id of the remote tier, given by whoever writes there first; `None` where nothing is written there.
    pub async fn remote_id(&self) -> Result<Option<&str>, StoreError> {
        match self.writable() {
            Some(remote) => remote.make_id().await.map(Some),
            None => Ok(None),
        }
    }
}
