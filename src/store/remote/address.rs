//! Addresses: the URL of a store, and the URL of a server.

use std::fmt;

use object_store::path::Path;
use url::Url;

use super::RemoteError;

/// What is shown for a name and password.
const USER: &str = "…@";

/// Which protocol a store speaks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Scheme {
    S3,
    Google,
    Azure,
}

impl Scheme {
    pub(super) fn named(name: &str) -> Option<Self> {
        match name {
            "s3" => Some(Self::S3),
            "gs" => Some(Self::Google),
            "az" => Some(Self::Azure),
            _ => None,
        }
    }

    fn name(self) -> &'static str {
        match self {
            Self::S3 => "s3",
            Self::Google => "gs",
            Self::Azure => "az",
        }
    }

    /// What people write who mean one of these.
    fn meant(name: &str) -> Option<Self> {
        match name.to_ascii_lowercase().as_str() {
            "s3" | "s3a" | "s3n" | "aws" => Some(Self::S3),
            "gs" | "gcs" | "google" => Some(Self::Google),
            "az" | "azure" | "abfs" | "abfss" | "adl" | "wasb" | "wasbs" => Some(Self::Azure),
            _ => None,
        }
    }
}

/// `s3://bucket/folder`, taken apart.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Address {
    pub scheme: Scheme,
    /// Azure calls it a container.
    pub bucket: String,
    pub folder: Path,
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}://{}", self.scheme.name(), self.bucket)?;
        if self.folder.is_root() { Ok(()) } else { write!(f, "/{}", self.folder) }
    }
}

impl Address {
    pub(super) fn parse(url: &str) -> Result<Self, RemoteError> {
        let shown = redacted(url);
        let refuse = |message: &str| RemoteError::new(format!("`{shown}`: {message}"));
        let (scheme, rest) = url
            .split_once("://")
            .ok_or_else(|| refuse("this is no URL").hint("stores look like `s3://bucket/folder`"))?;
        let scheme = Scheme::named(scheme).ok_or_else(|| unknown_scheme(scheme, &shown))?;
        let (bucket, folder) = rest.split_once('/').unwrap_or((rest, ""));
        let name = scheme.name();
        if shown.contains(USER) {
            return Err(refuse("a store's URL holds no names and passwords").hint(match scheme {
                Scheme::Azure => "write `az://container/folder`; the account goes to AZURE_STORAGE_ACCOUNT_NAME",
                Scheme::Google => "write `gs://bucket/folder`; credentials come from GOOGLE_APPLICATION_CREDENTIALS",
                Scheme::S3 => {
                    "write `s3://bucket/folder`; credentials come from AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or a \
                     profile"
                }
            }));
        }
        if bucket.contains(':') {
            let hint = format!("write `{name}://bucket/folder`; the server's address goes to `endpoint:`");
            return Err(refuse("a bucket has no port").hint(hint));
        }
        if url.contains(['?', '#']) {
            return Err(refuse("a store's URL has no `?` and no `#`")
                .hint("`endpoint:` and `region:` of cuda-agent.yaml, and the environment, say how it is reached"));
        }
        if bucket.is_empty() {
            return Err(refuse("the bucket is missing").hint(format!("write `{name}://bucket/folder`")));
        }
        let odd = |c: char| !(c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.'));
        if bucket.contains(odd) || matches!(bucket, "." | "..") {
            return Err(refuse("no bucket has such a name").hint("names are letters, digits, `-`, `_` and `.`"));
        }
        let folder = folder.trim_end_matches('/');
        if folder.split('/').any(|part| matches!(part, "." | "..")) {
            return Err(refuse("the folder has a `.` or `..` in it").hint("write the folder's full name"));
        }
        let folder = Path::parse(folder).map_err(|_| {
            refuse("this is no folder of a store").hint("names of folders are not empty and have no control characters")
        })?;
        Ok(Self { scheme, bucket: bucket.to_owned(), folder })
    }
}

fn unknown_scheme(scheme: &str, shown: &str) -> RemoteError {
    let error = RemoteError::new(format!("`{shown}`: `{scheme}://` is not a kind of store"));
    let server = matches!(scheme, "http" | "https");
    error.hint(match Scheme::meant(scheme) {
        Some(meant) => format!("did you mean `{}://`?", meant.name()),
        None if server => "write `store: s3://bucket/folder` and `endpoint: URL of the server`".to_owned(),
        None => "stores are a folder, file://, memory://, s3://, gs:// and az://".to_owned(),
    })
}

/// The URL of a server; `source` says who named it.
pub(super) fn endpoint(source: &str, text: &str) -> Result<String, RemoteError> {
    let shown = redacted(text);
    let refuse = |message: String| RemoteError::new(format!("{source}: {message}"));
    let example = "write it as `https://host` or `http://host:port`";
    let url = Url::parse(text).map_err(|error| refuse(format!("`{shown}` is no URL: {error}")).hint(example))?;
    if !matches!(url.scheme(), "http" | "https") {
        return Err(refuse(format!("`{shown}` is no address of a server")).hint(example));
    }
    if !url.username().is_empty() || url.password().is_some() {
        return Err(refuse(format!("`{shown}` holds a name or password")).hint("credentials come from the environment"));
    }
    if url.query().is_some() || url.fragment().is_some() {
        return Err(refuse(format!("`{shown}` has a `?` or `#`")).hint(example));
    }
    Ok(text.trim_end_matches('/').to_owned())
}

/// A URL as it may be shown: without what could be a password, or a token in a query.
pub fn redacted(url: &str) -> String {
    let (scheme, rest) = url.split_once("://").map_or(("", url), |(scheme, rest)| (&url[..scheme.len() + 3], rest));
    let cut = rest.find(['?', '#']).map_or(rest, |at| &rest[..at]);
    let query = if cut.len() < rest.len() { "?…" } else { "" };
    let authority = cut.split('/').next().unwrap_or_default();
    // A password may hold a `/`, a `?` or a `#` of its own, so everything before the last `@` goes.
    let user = authority.contains('@') || authority.contains(':') && rest.contains('@');
    match rest.rsplit_once('@') {
        Some((_, host)) if user => {
            let host = host.find(['?', '#']).map_or(host, |at| &host[..at]);
            format!("{scheme}{USER}{host}{query}")
        }
        _ => format!("{scheme}{cut}{query}"),
    }
}
