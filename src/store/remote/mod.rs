//! From the URL of a remote store to its object store: `s3://bucket/folder`, `gs://bucket/folder`, `az://container/folder`.
//!
//! Credentials come from the environment, and for S3 from AWS profiles too, as the AWS command line has it. Everything
//! that could hold a secret stays out of errors and `Debug` output.

mod address;
mod patience;
mod process;
mod profile;
pub mod pulse;

use std::collections::BTreeMap;
use std::error::Error as StdError;
use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;

use object_store::aws::{AmazonS3Builder, AmazonS3ConfigKey, AwsCredential};
use object_store::azure::{AzureConfigKey, MicrosoftAzureBuilder};
use object_store::gcp::{GoogleCloudStorageBuilder, GoogleConfigKey};
use object_store::path::Path;
use object_store::prefix::PrefixStore;
use object_store::{ClientOptions, ObjectStore, StaticCredentialProvider};

pub use address::redacted;
use address::{Address, Scheme};
use patience::Unanswered;
use process::CredentialProcess;
use profile::{Credentials, Profile};
use pulse::Pulse;

/// How a remote store is reached, beyond its URL.
#[derive(Clone, Default)]
pub struct RemoteOptions {
    /// The server, where it isn't the cloud's own; goes before what the environment and profiles say.
    pub endpoint: Option<String>,
    /// The region of the bucket; goes before what the environment and profiles say.
    pub region: Option<String>,
    /// Whether a server may be used that cannot create an object only where there is none.
    pub single_writer: bool,
    /// Told whether the server answers.
    pub pulse: Arc<Pulse>,
}

/// By hand, since an endpoint may have been written with a password in it.
impl fmt::Debug for RemoteOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RemoteOptions")
            .field("endpoint", &self.endpoint.as_deref().map(redacted))
            .field("region", &self.region)
            .field("single_writer", &self.single_writer)
            .finish()
    }
}

/// A remote store, ready for requests; none was made yet.
pub struct Opened {
    /// The folder of the URL, as an object store: names in it start with `v1/`.
    pub backend: Arc<dyn ObjectStore>,
    /// The URL as it is shown: without a slash at the end.
    pub url: String,
}

/// By hand, since a backend may hold credentials.
impl fmt::Debug for Opened {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Opened").field("url", &self.url).finish_non_exhaustive()
    }
}

/// Why a remote store can't be opened, or didn't do what it was asked to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RemoteError {
    /// What is wrong.
    pub message: String,
    /// What to do about it.
    pub hint: Option<String>,
}

impl RemoteError {
    fn new(message: impl Into<String>) -> Self {
        Self { message: message.into(), hint: None }
    }

    fn hint(mut self, hint: impl Into<String>) -> Self {
        self.hint = Some(hint.into());
        self
    }
}

impl fmt::Display for RemoteError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)?;
        self.hint.iter().try_for_each(|hint| write!(f, "; {hint}"))
    }
}

impl std::error::Error for RemoteError {}

/// Whether a URL names a store that this module opens.
pub fn is_remote(url: &str) -> bool {
    url.split_once("://").is_some_and(|(scheme, _)| Scheme::named(scheme).is_some())
}

/// Whose credentials the environment names: names and numbers of accounts, never a secret.
pub fn who() -> String {
    const NAMES: [&str; 7] = [
        "AWS_ACCESS_KEY_ID",
        "AWS_PROFILE",
        "AWS_ROLE_ARN",
        "GOOGLE_APPLICATION_CREDENTIALS",
        "SERVICE_ACCOUNT",
        "AZURE_STORAGE_ACCOUNT_NAME",
        "AZURE_CLIENT_ID",
    ];
    NAMES.map(|name| std::env::var(name).unwrap_or_default()).join("\n")
}

/// The URL of a remote store as [`open`] shows it, for those who don't open it. What [`open`] refuses is refused.
pub fn shown(url: &str) -> Result<String, RemoteError> {
    Ok(Address::parse(url)?.to_string())
}

/// Prepares the way to a remote store. Makes no request, so it says nothing about whether the store is there.
pub fn open(url: &str, options: &RemoteOptions) -> Result<Opened, RemoteError> {
    open_from(url, options, &Surroundings::detect())
}

fn open_from(url: &str, options: &RemoteOptions, here: &Surroundings) -> Result<Opened, RemoteError> {
    let address = Address::parse(url)?;
    let folder = address.folder.clone();
    let backend = match address.scheme {
        Scheme::S3 => below(folder, s3(&address, options, here)?.build()),
        Scheme::Google => below(folder, google(&address, options, here)?.build()),
        Scheme::Azure => below(folder, azure(&address, options, here)?.build()),
    };
    let backend = backend.map_err(|error| RemoteError::new(format!("{address}: {error}")))?;
    Ok(Opened { backend, url: address.to_string() })
}

/// A folder of a store as a store: all that this costs is to join two paths for each request.
fn below<T: ObjectStore>(folder: Path, store: object_store::Result<T>) -> object_store::Result<Arc<dyn ObjectStore>> {
    let store = store?;
    Ok(match folder.is_root() {
        true => Arc::new(store),
        false => Arc::new(PrefixStore::new(store, folder)),
    })
}

/// What decides how a store is reached besides what the project says. A parameter, so that tests don't change the process.
struct Surroundings {
    variables: BTreeMap<String, String>,
    /// Whose virtual machine this is: its metadata service has credentials. Asking for them anywhere else only waits.
    cloud: Option<Scheme>,
}

impl Surroundings {
    fn detect() -> Self {
        let variables = std::env::vars_os().filter_map(|(name, value)| {
            Some((name.into_string().ok()?, value.into_string().ok().filter(|value| !value.is_empty())?))
        });
        Self { variables: variables.collect(), cloud: cloud_of(|file| std::fs::read_to_string(file).ok()) }
    }

    fn variable(&self, name: &str) -> Option<&str> {
        self.variables.get(name).map(String::as_str)
    }

    fn any(&self, names: &[&str]) -> bool {
        names.iter().any(|name| self.variable(name).is_some())
    }

    /// What the variables that start so set, by the keys of a builder. This is `from_env` of the builders.
    fn settings<K: std::str::FromStr>(&self, start: &str) -> impl Iterator<Item = (K, &str)> {
        let ours = self.variables.iter().filter(move |(name, _)| name.starts_with(start));
        ours.filter_map(|(name, value)| Some((name.to_ascii_lowercase().parse().ok()?, value.as_str())))
    }

    fn home(&self) -> Option<PathBuf> {
        self.variable("HOME").map(PathBuf::from)
    }
}

/// The cloud whose virtual machine this is, by what the firmware says.
fn cloud_of(read: impl Fn(&str) -> Option<String>) -> Option<Scheme> {
    let says = |file: &str, text: &str| read(file).is_some_and(|found| found.trim().starts_with(text));
    if says("/sys/class/dmi/id/sys_vendor", "Amazon EC2") || says("/sys/hypervisor/uuid", "ec2") {
        return Some(Scheme::S3);
    }
    if says("/sys/class/dmi/id/product_name", "Google") {
        return Some(Scheme::Google);
    }
    // The tag that Microsoft documents for this purpose.
    says("/sys/class/dmi/id/chassis_asset_tag", "7783-7084-3265-9085-8269-3286-77").then_some(Scheme::Azure)
}

/// The server that somebody names, and how it is spoken to.
fn server(
    options: &RemoteOptions,
    variables: &[&'static str],
    here: &Surroundings,
    profile: Option<&str>,
) -> Result<(Option<String>, ClientOptions), RemoteError> {
    let setting = ("`endpoint`", options.endpoint.as_deref());
    let variables = variables.iter().map(|name| (*name, here.variable(name)));
    let profile = ("endpoint_url of the AWS profile", profile);
    let mut named = [setting].into_iter().chain(variables).chain([profile]);
    let found = named.find_map(|(source, text)| Some(address::endpoint(source, text?)));
    let endpoint = found.transpose()?;
    let plain = endpoint.as_ref().is_some_and(|endpoint| endpoint.starts_with("http://"));
    Ok((endpoint, patience::client_options().with_allow_http(plain)))
}

fn s3(address: &Address, options: &RemoteOptions, here: &Surroundings) -> Result<AmazonS3Builder, RemoteError> {
    let profile = Profile::find(here)?;
    let variables = ["AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"];
    let (endpoint, client) = server(options, &variables, here, profile.endpoint())?;
    let builder = AmazonS3Builder::new().with_client_options(client).with_retry(patience::retry());
    // Payloads stay signed: the server then checks what it got, on every server and without a word more of protocol. The
    // SHA-256 takes half a second for a gigabyte, less than a network does; AWS_UNSIGNED_PAYLOAD=true leaves it out.
    let builder = builder.with_http_connector(patience::Connector::new(&options.pulse));
    let mut builder = here.settings("AWS_").fold(builder, |builder, (key, value)| builder.with_config(key, value));
    if let Some(endpoint) = endpoint {
        // The key for S3 alone wins over the one for all services, whatever the environment said. Path style is the
        // builder's default: servers of one's own seldom have a host name for each bucket.
        builder = builder.with_config(AmazonS3ConfigKey::S3Endpoint, endpoint);
    }
    let said = builder.get_config_value(&AmazonS3ConfigKey::Region);
    // Where nobody says, this is us-east-1: servers of one's own don't care, and the others' answer says what is wrong.
    if let Some(region) = options.region.clone().or(said).or_else(|| profile.region().map(str::to_owned)) {
        builder = builder.with_region(region);
    }
    s3_credentials(builder.with_bucket_name(&address.bucket), address, here, &profile)
}

/// The order is that of the AWS command line: the environment, the profile, the container, the machine.
fn s3_credentials(
    builder: AmazonS3Builder,
    address: &Address,
    here: &Surroundings,
    profile: &Profile,
) -> Result<AmazonS3Builder, RemoteError> {
    if builder.get_config_value(&AmazonS3ConfigKey::SkipSignature).as_deref() == Some("true") {
        return Ok(builder);
    }
    match (here.variable("AWS_ACCESS_KEY_ID"), here.variable("AWS_SECRET_ACCESS_KEY")) {
        (Some(_), Some(_)) => return Ok(builder),
        (None, None) => {}
        (id, _) => {
            let (set, unset) = match id {
                Some(_) => ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"),
                None => ("AWS_SECRET_ACCESS_KEY", "AWS_ACCESS_KEY_ID"),
            };
            let error = RemoteError::new(format!("{address}: {set} is set and {unset} is not"));
            return Err(error.hint("set both, or unset both to use a profile"));
        }
    }
    if here.any(&["AWS_WEB_IDENTITY_TOKEN_FILE"]) && here.any(&["AWS_ROLE_ARN"]) {
        return Ok(builder);
    }
    match profile.credentials()? {
        Some(Credentials::Keys { id, secret, token }) => {
            let keys = AwsCredential { key_id: id.into(), secret_key: secret.into(), token: token.map(str::to_owned) };
            return Ok(builder.with_credentials(Arc::new(StaticCredentialProvider::new(keys))));
        }
        Some(Credentials::Process(command)) => {
            return Ok(builder.with_credentials(Arc::new(CredentialProcess::new(command))));
        }
        Some(Credentials::WebIdentity { token_file, role, session }) => {
            let builder = builder.with_config(AmazonS3ConfigKey::WebIdentityTokenFile, token_file);
            let builder = builder.with_config(AmazonS3ConfigKey::RoleArn, role);
            return Ok(match session {
                Some(session) => builder.with_config(AmazonS3ConfigKey::RoleSessionName, session),
                None => builder,
            });
        }
        None => {}
    }
    let container = here.any(&["AWS_CONTAINER_CREDENTIALS_RELATIVE_URI"])
        || (here.any(&["AWS_CONTAINER_CREDENTIALS_FULL_URI"]) && here.any(&["AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE"]));
    let machine = here.cloud == Some(Scheme::S3) || here.any(&["AWS_METADATA_ENDPOINT"]);
    let switched_off =
        here.variable("AWS_EC2_METADATA_DISABLED").is_some_and(|value| value.eq_ignore_ascii_case("true"));
    if container || (machine && !switched_off) {
        return Ok(builder);
    }
    let error = RemoteError::new(format!("{address}: no credentials, neither in the environment nor in {profile}"));
    Err(error.hint(
        "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE; for a public bucket AWS_SKIP_SIGNATURE=true",
    ))
}

fn google(
    address: &Address,
    options: &RemoteOptions,
    here: &Surroundings,
) -> Result<GoogleCloudStorageBuilder, RemoteError> {
    let (endpoint, client) = server(options, &["GOOGLE_BASE_URL"], here, None)?;
    let builder = GoogleCloudStorageBuilder::new().with_client_options(client);
    let builder = builder.with_retry(patience::retry()).with_http_connector(patience::Connector::new(&options.pulse));
    let mut builder = here.settings("GOOGLE_").fold(builder, |builder, (key, value)| builder.with_config(key, value));
    if let Some(file) = here.variable("SERVICE_ACCOUNT") {
        builder = builder.with_service_account_path(file);
    }
    if let Some(endpoint) = endpoint {
        builder = builder.with_base_url(&endpoint);
    }
    use GoogleConfigKey::{ApplicationCredentials, BearerToken, ServiceAccount, ServiceAccountKey, SkipSignature};
    let keys = [ApplicationCredentials, BearerToken, ServiceAccount, ServiceAccountKey];
    let given = keys.iter().any(|key| builder.get_config_value(key).is_some())
        || builder.get_config_value(&SkipSignature).as_deref() == Some("true");
    let default = here.home().map(|home| home.join(".config/gcloud/application_default_credentials.json"));
    // Serverless containers have the metadata service too, and no firmware to tell.
    let machine = here.cloud == Some(Scheme::Google) || here.any(&["K_SERVICE", "CLOUD_RUN_JOB", "GCE_METADATA_HOST"]);
    if !given && !machine && !default.is_some_and(|file| file.exists()) {
        let error = RemoteError::new(format!("{address}: no credentials"));
        return Err(error.hint(
            "run `gcloud auth application-default login`, or set GOOGLE_APPLICATION_CREDENTIALS to a key file; for a \
             public bucket GOOGLE_SKIP_SIGNATURE=true",
        ));
    }
    Ok(builder.with_bucket_name(&address.bucket))
}

fn azure(
    address: &Address,
    options: &RemoteOptions,
    here: &Surroundings,
) -> Result<MicrosoftAzureBuilder, RemoteError> {
    let (endpoint, client) = server(options, &["AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT"], here, None)?;
    let builder = MicrosoftAzureBuilder::new().with_client_options(client);
    let builder = builder.with_retry(patience::retry()).with_http_connector(patience::Connector::new(&options.pulse));
    // What the Azure command line calls the account, unless the longer name is set too.
    let account = here.variable("AZURE_STORAGE_ACCOUNT");
    let builder = account.into_iter().fold(builder, |builder, account| builder.with_account(account));
    let mut builder = here.settings("AZURE_").fold(builder, |builder, (key, value)| builder.with_config(key, value));
    if let Some(endpoint) = endpoint {
        builder = builder.with_endpoint(endpoint);
    }
    let on = |key: AzureConfigKey| builder.get_config_value(&key).as_deref() == Some("true");
    if on(AzureConfigKey::UseEmulator) {
        return Ok(builder.with_container_name(&address.bucket));
    }
    if builder.get_config_value(&AzureConfigKey::AccountName).is_none() {
        let error = RemoteError::new(format!("{address}: the storage account is not known"));
        return Err(error.hint("set AZURE_STORAGE_ACCOUNT_NAME"));
    }
    use AzureConfigKey::{AccessKey, ClientSecret, FederatedTokenFile, MsiEndpoint, SasKey, Token};
    let given = [AccessKey, ClientSecret, FederatedTokenFile, MsiEndpoint, SasKey, Token]
        .iter()
        .any(|key| builder.get_config_value(key).is_some())
        || on(AzureConfigKey::UseAzureCli)
        || on(AzureConfigKey::SkipSignature)
        || here.any(&["AZURE_CREDENTIAL_TYPE", "AZURE_FABRIC_SESSION_TOKEN"]);
    if !given && here.cloud != Some(Scheme::Azure) {
        let error = RemoteError::new(format!("{address}: no credentials"));
        return Err(error.hint(
            "set AZURE_STORAGE_ACCOUNT_KEY or AZURE_STORAGE_SAS_TOKEN, or AZURE_USE_AZURE_CLI=true after `az login`; for \
             a public container AZURE_SKIP_SIGNATURE=true",
        ));
    }
    Ok(builder.with_container_name(&address.bucket))
}

/// Whether a server was given up, so that asking once more is of no use.
pub fn is_given_up(error: &object_store::Error) -> bool {
    cause::<Unanswered>(error).is_some()
}

/// What a remote store said, in a sentence, and what to do about it. For errors of requests to what [`open`] made.
pub fn explain(error: &object_store::Error) -> RemoteError {
    if let Some(unanswered) = cause::<Unanswered>(error) {
        let hint = "check that the server is up and that `endpoint:` is right; `--offline` works with what is here";
        return RemoteError::new(unanswered.to_string()).hint(hint);
    }
    if let Some(error) = cause::<RemoteError>(error) {
        return error.clone();
    }
    let text = error.to_string();
    let message = match (element(&text, "Code"), element(&text, "Message")) {
        (Some(code), Some(message)) => format!("{code}: {}", message.trim_end_matches('.')),
        (Some(code), None) => code.to_owned(),
        // Behind the account of the attempts stands what the server said last.
        _ => match text.split_once(" - ") {
            Some((attempts, last)) if attempts.contains("Error performing") => {
                last.trim_end_matches([':', ' ']).to_owned()
            }
            _ => text.clone(),
        },
    };
    let hints = [
        ("NoSuchBucket", "make the bucket, or check its name"),
        ("ContainerNotFound", "make the container, or check its name"),
        ("RequestTimeTooSkewed", "set the clock of this machine"),
        ("ExpiredToken", "get new credentials"),
        ("InvalidAccessKeyId", "check AWS_ACCESS_KEY_ID, or the profile"),
        ("SignatureDoesNotMatch", "check AWS_SECRET_ACCESS_KEY, or the profile"),
        ("AuthorizationHeaderMalformed", "set `region:` to the bucket's region"),
        ("PermanentRedirect", "set `region:` to the bucket's region"),
        ("redirect without LOCATION", "set `region:` to the bucket's region"),
    ];
    let hint = hints.iter().find(|(said, _)| text.contains(said)).map(|(_, hint)| *hint);
    let denied =
        matches!(error, object_store::Error::PermissionDenied { .. } | object_store::Error::Unauthenticated { .. });
    let hint = hint.or(denied.then_some("the credentials don't allow it; ask whoever owns the store"));
    RemoteError { message, hint: hint.map(str::to_owned) }
}

/// The first of a kind among what led to an error.
fn cause<E: StdError + 'static>(error: &object_store::Error) -> Option<&E> {
    let mut next = error.source();
    while let Some(error) = next {
        if let Some(found) = error.downcast_ref::<E>() {
            return Some(found);
        }
        next = error.source();
    }
    None
}

/// The text of an element of the XML that S3 answers errors with.
fn element<'a>(text: &'a str, name: &str) -> Option<&'a str> {
    let (_, rest) = text.split_once(&format!("<{name}>"))?;
    let (inside, _) = rest.split_once(&format!("</{name}>"))?;
    Some(inside.trim()).filter(|inside| !inside.is_empty())
}

#[cfg(test)]
mod tests;
