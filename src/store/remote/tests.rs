use std::fmt::Write as _;
use std::time::{Duration, Instant};

use object_store::ObjectStoreExt;
use proptest::prelude::*;

use super::*;

fn here(variables: &[(&str, &str)]) -> Surroundings {
    let variables = variables.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
    Surroundings { variables, cloud: None }
}

const KEYS: [(&str, &str); 2] = [("AWS_ACCESS_KEY_ID", "id-of-env"), ("AWS_SECRET_ACCESS_KEY", "hunter2")];

/// A home with the two files of AWS in it.
fn home(config: &str, credentials: &str) -> tempfile::TempDir {
    let home = tempfile::tempdir().unwrap();
    std::fs::create_dir(home.path().join(".aws")).unwrap();
    std::fs::write(home.path().join(".aws/config"), config).unwrap();
    std::fs::write(home.path().join(".aws/credentials"), credentials).unwrap();
    home
}

fn with_home(home: &tempfile::TempDir, variables: &[(&str, &str)]) -> Surroundings {
    let mut here = here(variables);
    here.variables.insert("HOME".to_owned(), home.path().display().to_string());
    here
}

fn s3_of(options: &RemoteOptions, here: &Surroundings) -> Result<AmazonS3Builder, RemoteError> {
    s3(&Address::parse("s3://bucket/folder").unwrap(), options, here)
}

/// The key, region and server that requests go out with.
fn outcome(options: &RemoteOptions, here: &Surroundings) -> String {
    let builder = match s3_of(options, here) {
        Ok(builder) => builder,
        Err(error) => return format!("error: {error}"),
    };
    let region = builder.get_config_value(&AmazonS3ConfigKey::Region).unwrap_or_else(|| "-".to_owned());
    let endpoint = builder.get_config_value(&AmazonS3ConfigKey::S3Endpoint).unwrap_or_else(|| "-".to_owned());
    let store = builder.build().unwrap();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let credential = runtime.block_on(store.credentials().get_credential()).unwrap();
    format!("{} {} {region} {endpoint}", credential.key_id, credential.token.as_deref().unwrap_or("-"))
}

#[test]
fn urls_are_taken_apart() {
    let long = "s3://bucket/team/project/";
    for (url, bucket, folder, shown) in [
        ("s3://bucket", "bucket", "", "s3://bucket"),
        ("s3://bucket/", "bucket", "", "s3://bucket"),
        (long, "bucket", "team/project", "s3://bucket/team/project"),
        ("gs://a.b_c-1/d@e", "a.b_c-1", "d@e", "gs://a.b_c-1/d@e"),
        ("az://container/x:y", "container", "x:y", "az://container/x:y"),
    ] {
        let address = Address::parse(url).unwrap();
        assert_eq!((address.bucket.as_str(), address.folder.as_ref()), (bucket, folder), "{url}");
        assert_eq!(address.to_string(), shown);
        assert_eq!(super::shown(url).as_deref(), Ok(shown));
    }
}

#[test]
fn urls_that_are_refused() {
    let mut text = String::new();
    for url in [
        "bucket/folder",
        "s3a://bucket/folder",
        "abfss://container@account.dfs.core.windows.net/folder",
        "ftp://host/folder",
        "https://minio.example/bucket",
        "s3://",
        "s3:///folder",
        "gs://",
        "s3://id:hunter2@bucket/folder",
        "s3://id:hunt/er2@bucket/folder",
        "s3://hunter2@bucket",
        "s3://localhost:9000/bucket",
        "s3://bucket/folder?token=hunter2",
        "s3://bucket/folder#hunter2",
        "s3://bu cket/folder",
        "s3://../folder",
        "s3://bucket/a/../b",
        "s3://bucket/./b",
        "s3://bucket/a//b",
        "s3://bucket/a\tb",
    ] {
        let error = open_from(url, &RemoteOptions::default(), &here(&KEYS)).unwrap_err();
        writeln!(text, "{error}").unwrap();
    }
    assert!(!text.contains("hunter2"), "{text}");
    insta::assert_snapshot!(text);
}

#[test]
fn endpoints_that_are_refused() {
    let mut text = String::new();
    for endpoint in [
        "localhost:8333",
        "minio",
        "s3://bucket",
        "http://id:hunter2@host:1",
        "http://id:hunter2@ho st",
        "http://host/?x=hunter2",
    ] {
        let options = RemoteOptions { endpoint: Some(endpoint.to_owned()), ..RemoteOptions::default() };
        let error = open_from("s3://bucket", &options, &here(&KEYS)).unwrap_err();
        writeln!(text, "{error}").unwrap();
        text += &format!("{options:?}\n");
    }
    let from_variable = here(&[KEYS[0], KEYS[1], ("AWS_ENDPOINT_URL", "http://id:hunter2@host")]);
    writeln!(text, "{}", s3_of(&RemoteOptions::default(), &from_variable).unwrap_err()).unwrap();
    assert!(!text.contains("hunter2"), "{text}");
    insta::assert_snapshot!(text);
}

#[test]
fn the_project_goes_before_the_environment_and_that_before_the_profile() {
    let home = home(
        "[default]\nregion = from-default\n\
         [profile work]\nregion = from-profile\nendpoint_url = https://profile\nservices = local\n\
         [services local]\ns3 =\n  endpoint_url = https://service\n",
        "[default]\naws_access_key_id = id-of-default\naws_secret_access_key = s\n\
         [work]\naws_access_key_id = id-of-work\naws_secret_access_key = s\naws_session_token = token-of-work\n",
    );
    let project = RemoteOptions {
        endpoint: Some("https://project/".to_owned()),
        region: Some("from-project".to_owned()),
        ..RemoteOptions::default()
    };
    let nothing = RemoteOptions::default();
    let work = ("AWS_PROFILE", "work");
    let region = ("AWS_DEFAULT_REGION", "from-env");
    let all = ("AWS_ENDPOINT_URL", "https://env");
    let own = ("AWS_ENDPOINT_URL_S3", "https://env-s3");
    for (options, variables, expected) in [
        (&nothing, &[][..], "id-of-default - from-default -"),
        (&nothing, &[work], "id-of-work token-of-work from-profile https://service"),
        (&nothing, &[work, region, all], "id-of-work token-of-work from-env https://env"),
        (&nothing, &[work, region, all, own], "id-of-work token-of-work from-env https://env-s3"),
        (&nothing, &[work, KEYS[0], KEYS[1]], "id-of-env - from-profile https://service"),
        (&project, &[work, region, all, own], "id-of-work token-of-work from-project https://project"),
        (&project, &KEYS, "id-of-env - from-project https://project"),
    ] {
        assert_eq!(outcome(options, &with_home(&home, variables)), expected, "{variables:?}");
    }
}

#[test]
fn files_of_aws_may_lie_elsewhere() {
    let home = home("", "");
    std::fs::write(home.path().join("mine"), "[x]\naws_access_key_id=id-of-mine\naws_secret_access_key=s").unwrap();
    let here = with_home(&home, &[("AWS_PROFILE", "x"), ("AWS_SHARED_CREDENTIALS_FILE", "~/mine")]);
    assert_eq!(outcome(&RemoteOptions::default(), &here), "id-of-mine - - -");
}

#[test]
fn credentials_that_are_not_to_be_had() {
    let home = home(
        "[profile role]\nrole_arn = arn:x\nsource_profile = default\naws_access_key_id = i\naws_secret_access_key = hunter2\n\
         [profile sso]\nsso_session = s\n[profile login]\nlogin_session = s\n\
         [profile half]\naws_secret_access_key = hunter2\n[profile empty]\nregion = r\n",
        "",
    );
    let mut text = String::new();
    let cases: [&[(&str, &str)]; 9] = [
        &[],
        &[("AWS_PROFILE", "absent")],
        &[("AWS_PROFILE", "absent"), KEYS[0], KEYS[1]],
        &[("AWS_PROFILE", "role")],
        &[("AWS_PROFILE", "sso")],
        &[("AWS_PROFILE", "login")],
        &[("AWS_PROFILE", "half")],
        &[("AWS_PROFILE", "empty")],
        &[KEYS[1]],
    ];
    for variables in cases {
        let error = s3_of(&RemoteOptions::default(), &with_home(&home, variables)).unwrap_err();
        writeln!(text, "{error}").unwrap();
    }
    for url in ["gs://bucket", "az://container"] {
        writeln!(text, "{}", open_from(url, &RemoteOptions::default(), &here(&[])).unwrap_err()).unwrap();
    }
    let account = here(&[("AZURE_STORAGE_ACCOUNT", "me")]);
    writeln!(text, "{}", open_from("az://container", &RemoteOptions::default(), &account).unwrap_err()).unwrap();
    assert!(!text.contains("hunter2"), "{text}");
    insta::assert_snapshot!(text.replace(&home.path().display().to_string(), "~"));
}

#[test]
fn metadata_services_are_asked_only_where_there_is_one() {
    let on = |cloud| Surroundings { cloud: Some(cloud), ..here(&[("AZURE_STORAGE_ACCOUNT_NAME", "me")]) };
    let open = |url: &str, here: &Surroundings| open_from(url, &RemoteOptions::default(), here).is_ok();
    for (url, own, other) in [
        ("s3://bucket", Scheme::S3, Scheme::Google),
        ("gs://bucket", Scheme::Google, Scheme::Azure),
        ("az://container", Scheme::Azure, Scheme::S3),
    ] {
        assert!(open(url, &on(own)), "{url}");
        assert!(!open(url, &on(other)), "{url}");
    }
    let mut off = on(Scheme::S3);
    off.variables.insert("AWS_EC2_METADATA_DISABLED".to_owned(), "true".to_owned());
    assert!(!open("s3://bucket", &off));
    assert!(open("s3://bucket", &here(&[("AWS_SKIP_SIGNATURE", "true")])));
    assert!(open("s3://bucket", &here(&[("AWS_CONTAINER_CREDENTIALS_RELATIVE_URI", "/v2/x")])));
}

#[test]
fn the_firmware_tells_the_cloud() {
    let machine =
        |file: &'static str, text: &'static str| cloud_of(move |asked| (asked == file).then(|| text.to_owned()));
    assert_eq!(machine("/sys/class/dmi/id/sys_vendor", "Amazon EC2\n"), Some(Scheme::S3));
    assert_eq!(machine("/sys/hypervisor/uuid", "ec2e1916-9099-7caf-fd21-012345abcdef\n"), Some(Scheme::S3));
    assert_eq!(machine("/sys/class/dmi/id/product_name", "Google Compute Engine\n"), Some(Scheme::Google));
    assert_eq!(
        machine("/sys/class/dmi/id/chassis_asset_tag", "7783-7084-3265-9085-8269-3286-77\n"),
        Some(Scheme::Azure)
    );
    assert_eq!(machine("/sys/class/dmi/id/sys_vendor", "LENOVO\n"), None);
}

#[test]
fn what_is_opened_does_not_show_credentials() {
    let opened = open_from("s3://bucket/folder/", &RemoteOptions::default(), &here(&KEYS)).unwrap();
    assert_eq!(format!("{opened:?}"), r#"Opened { url: "s3://bucket/folder", .. }"#);
    let builder = s3_of(&RemoteOptions::default(), &here(&KEYS)).unwrap().build().unwrap();
    assert!(!format!("{builder:?}").contains("hunter2"));
}

#[tokio::test]
async fn a_server_that_is_not_there_is_given_up_soon() {
    let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let options = RemoteOptions { endpoint: Some(format!("http://127.0.0.1:{port}")), ..RemoteOptions::default() };
    let connector = patience::Connector { stranger: Duration::from_millis(500), pulse: Default::default() };
    let store = s3_of(&options, &here(&KEYS)).unwrap().with_http_connector(connector).build().unwrap();
    let started = Instant::now();
    let error = store.head(&Path::from("v1/x")).await.unwrap_err();
    assert!(started.elapsed() >= Duration::from_millis(500), "it was tried again");
    let told = explain(&error).to_string().replace(&format!("127.0.0.1:{port}"), "SERVER");
    let told = told.replace(|c: char| c.is_ascii_digit(), "N");
    insta::assert_snapshot!(told, @"http://SERVER has not answered for N s: Connection refused (os error NNN); check that the server is up and that `endpoint:` is right; `--offline` works with what is here");
}

#[test]
fn answers_of_servers_are_told_in_a_sentence() {
    let answer = |text: &str| object_store::Error::Generic { store: "S3", source: text.into() };
    let denied = object_store::Error::PermissionDenied { path: "v1/x".to_owned(), source: "403".into() };
    let mut text = String::new();
    for error in [
        answer(
            "Server returned non-2xx status code: 404 Not Found: <?xml?><Error><Code>NoSuchBucket</Code><Message>The specified bucket does not exist</Message></Error>",
        ),
        answer("<Error><Code>RequestTimeTooSkewed</Code><Message></Message></Error>"),
        answer("Received redirect without LOCATION, this normally indicates an incorrectly configured region"),
        answer(
            "Error performing PUT http://host/x in 61s, after 20 retries, max_retries: 1000, retry_timeout: 60s  - Server returned non-2xx status code: 503 Service Unavailable: ",
        ),
        answer("something else"),
        denied,
    ] {
        writeln!(text, "{}", explain(&error)).unwrap();
    }
    insta::assert_snapshot!(text);
}

proptest! {
    /// Whatever is written to a file of profiles is read from it, between comments, blanks and lines that make no sense.
    #[test]
    fn profiles_read_back(
        sections in proptest::collection::btree_map(
            "[a-z][a-z0-9-]{0,6}",
            proptest::collection::btree_map("[a-z_]{1,8}", "[!-~]([ -~]{0,10}[!-~])?", 0..4),
            0..4,
        ),
        noise in prop_oneof![Just(""), Just("# a comment = x\n"), Just("  ; [also]\n"), Just("\n \t\n"), Just("nonsense\n")],
        equals in prop_oneof![Just("="), Just(" = "), Just("\t=  ")],
    ) {
        let mut text = noise.to_owned();
        for (section, values) in &sections {
            writeln!(text, "[profile  {section} ]").unwrap();
            for (key, value) in values {
                write!(text, "{noise}{}{equals}{value}  \n{noise}", key.to_uppercase()).unwrap();
            }
        }
        let expected: BTreeMap<_, _> =
            sections.into_iter().map(|(section, values)| (format!("profile {section}"), values)).collect();
        prop_assert_eq!(profile::parse(&text), expected);
    }

    #[test]
    fn no_profile_panics(text in "[\\[\\]= \t\n#;a-c\"']{0,60}") {
        profile::parse(&text);
    }

    /// A password is not shown, whatever is in it.
    #[test]
    fn no_password_is_shown(password in "[ -~]{0,12}", user in "[a-z]{0,4}", folder in "[a-z/@?#:]{0,8}") {
        let url = format!("s3://{user}:QQ{password}QQ@bucket/{folder}");
        prop_assert!(!redacted(&url).contains("QQ"), "{}", redacted(&url));
        let error = Address::parse(&url).unwrap_err().to_string();
        prop_assert!(!error.contains("QQ"), "{}", error);
    }

    #[test]
    fn no_url_panics(url in "(s3|gs|http)?:?/?/?[ -~é]{0,20}") {
        let _ = Address::parse(&url);
        let _ = address::endpoint("x", &url);
    }
}
