//! Credentials that a command prints: `credential_process` of an AWS profile.

use std::fmt;
use std::process::Stdio;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use arrow::compute::kernels::cast_utils::string_to_timestamp_nanos;
use futures::future::BoxFuture;
use object_store::CredentialProvider;
use object_store::aws::AwsCredential;
use serde::Deserialize;
use tokio::sync::Mutex;

use super::RemoteError;

/// How long the command may take: it may well ask somebody for a finger on a token.
const DEADLINE: Duration = Duration::from_secs(60);
/// New credentials are fetched this long before the old ones end, since a request carries its own through all its retries.
const EARLY: Duration = Duration::from_secs(300);

/// Runs the command when credentials are asked for, and again before they expire.
pub(super) struct CredentialProcess {
    command: String,
    current: Mutex<Option<Fetched>>,
}

#[derive(Clone)]
struct Fetched {
    credential: Arc<AwsCredential>,
    expires: Option<SystemTime>,
}

/// What the command prints.
#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Printed {
    version: u32,
    access_key_id: String,
    secret_access_key: String,
    session_token: Option<String>,
    expiration: Option<String>,
}

impl CredentialProcess {
    pub(super) fn new(command: &str) -> Self {
        Self { command: command.to_owned(), current: Mutex::new(None) }
    }

    async fn credential(&self) -> Result<Arc<AwsCredential>, RemoteError> {
        let mut current = self.current.lock().await;
        if let Some(fetched) = current.as_ref().filter(|fetched| fetched.lasts(SystemTime::now())) {
            return Ok(Arc::clone(&fetched.credential));
        }
        let fetched = self.fetch().await.map_err(|message| {
            let error = RemoteError::new(format!("credential_process of the AWS profile: {message}"));
            error.hint("run the command by hand; it must print the JSON that the AWS command line documents")
        })?;
        let credential = Arc::clone(&fetched.credential);
        *current = Some(fetched);
        Ok(credential)
    }

    async fn fetch(&self) -> Result<Fetched, String> {
        // Through a shell, as the AWS tools do: the command may be quoted. What it complains of goes to the user.
        let mut command = tokio::process::Command::new("sh");
        command.arg("-c").arg(&self.command).stdin(Stdio::null()).stderr(Stdio::inherit()).kill_on_drop(true);
        let output = tokio::time::timeout(DEADLINE, command.output());
        let output = output.await.map_err(|_| format!("no answer for {} s", DEADLINE.as_secs()))?;
        let output = output.map_err(|error| error.to_string())?;
        match output.status.success() {
            true => read(&output.stdout),
            false => Err(format!("it ended with {}", output.status)),
        }
    }
}

impl Fetched {
    fn lasts(&self, now: SystemTime) -> bool {
        self.expires.is_none_or(|expires| expires > now + EARLY)
    }
}

/// Errors say nothing of what was printed: it holds secrets.
fn read(printed: &[u8]) -> Result<Fetched, String> {
    let printed: Printed = serde_json::from_slice(printed)
        .map_err(|error| format!("what it printed is not as it should be (line {})", error.line()))?;
    if printed.version != 1 {
        return Err(format!("it printed version {} of the format, not 1", printed.version));
    }
    let expires = printed.expiration.map(|text| {
        let nanoseconds = string_to_timestamp_nanos(&text).map_err(|_| "its Expiration is no time".to_owned())?;
        Ok::<_, String>(UNIX_EPOCH + Duration::from_nanos(nanoseconds.max(0).unsigned_abs()))
    });
    let credential = Arc::new(AwsCredential {
        key_id: printed.access_key_id,
        secret_key: printed.secret_access_key,
        token: printed.session_token,
    });
    Ok(Fetched { credential, expires: expires.transpose()? })
}

/// The command may name secrets.
impl fmt::Debug for CredentialProcess {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("CredentialProcess")
    }
}

impl CredentialProvider for CredentialProcess {
    type Credential = AwsCredential;

    fn get_credential<'a, 'b>(&'a self) -> BoxFuture<'b, object_store::Result<Arc<AwsCredential>>>
    where
        'a: 'b,
        Self: 'b,
    {
        Box::pin(async move {
            let credential = self.credential().await;
            credential.map_err(|error| object_store::Error::Generic { store: "S3", source: Box::new(error) })
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_it_prints_is_read() {
        let text = r#"{"Version": 1, "AccessKeyId": "id", "SecretAccessKey": "secret", "SessionToken": "token",
            "Expiration": "2030-01-02T03:04:05Z"}"#;
        let fetched = read(text.as_bytes()).unwrap_or_else(|error| panic!("{error}"));
        assert_eq!(fetched.credential.key_id, "id");
        assert_eq!(fetched.credential.secret_key, "secret");
        assert_eq!(fetched.credential.token.as_deref(), Some("token"));
        let expires = UNIX_EPOCH + Duration::from_secs(1_893_553_445);
        assert_eq!(fetched.expires, Some(expires));
        assert!(fetched.lasts(expires - EARLY - Duration::from_secs(1)));
        assert!(!fetched.lasts(expires - EARLY));
    }

    #[test]
    fn errors_do_not_repeat_what_was_printed() {
        for text in ["", "hunter2", r#"{"Version": 1, "SecretAccessKey": "hunter2"}"#, r#"{"Version": "hunter2"}"#] {
            let error = read(text.as_bytes()).err().unwrap_or_else(|| panic!("{text} was read"));
            assert!(!error.contains("hunter2"), "{error}");
        }
    }

    #[tokio::test]
    async fn the_command_runs_once_while_its_credentials_last() {
        let folder = tempfile::tempdir().unwrap();
        let count = folder.path().join("count");
        for (expiration, runs) in [("2199-01-01T00:00:00Z", 1), ("2001-01-01T00:00:00+00:00", 3)] {
            std::fs::write(&count, "").unwrap();
            let printed = format!(
                r#"{{"Version": 1, "AccessKeyId": "i", "SecretAccessKey": "s", "Expiration": "{expiration}"}}"#
            );
            let process = CredentialProcess::new(&format!("echo x >> '{}'; echo '{printed}'", count.display()));
            for _ in 0..3 {
                process.get_credential().await.unwrap();
            }
            assert_eq!(std::fs::read_to_string(&count).unwrap().lines().count(), runs, "{expiration}");
        }
    }

    #[tokio::test]
    async fn a_command_that_fails_is_told_of() {
        let error = CredentialProcess::new("exit 3").get_credential().await.unwrap_err();
        insta::assert_snapshot!(super::super::explain(&error), @"credential_process of the AWS profile: it ended with exit status: 3; run the command by hand; it must print the JSON that the AWS command line documents");
    }
}
