CREATE TABLE IF NOT EXISTS celery_leases_effects (
	stored_key VARCHAR(255) NOT NULL, 
	name VARCHAR(255) NOT NULL, 
	scope VARCHAR(255) NOT NULL, 
	state VARCHAR(16) NOT NULL, 
	fence BIGINT NOT NULL, 
	idempotency_key VARCHAR(64) NOT NULL, 
	reference TEXT, 
	result TEXT, 
	sent_at BIGINT NOT NULL, 
	done_at BIGINT, 
	expires_at BIGINT, 
	CONSTRAINT pk_celery_leases_effects PRIMARY KEY (stored_key, name, scope)
);

CREATE TABLE IF NOT EXISTS celery_leases_gates (
	name VARCHAR(255) NOT NULL, 
	trips INTEGER NOT NULL, 
	why TEXT NOT NULL, 
	closed_until BIGINT NOT NULL, 
	probe VARCHAR(64) DEFAULT '' NOT NULL, 
	probe_until BIGINT DEFAULT '0' NOT NULL, 
	expires_at BIGINT NOT NULL, 
	CONSTRAINT pk_celery_leases_gates PRIMARY KEY (name)
);

CREATE TABLE IF NOT EXISTS celery_leases_marks (
	stored_key VARCHAR(255) NOT NULL, 
	name VARCHAR(255) NOT NULL, 
	value VARCHAR(255) NOT NULL, 
	expires_at BIGINT NOT NULL, 
	CONSTRAINT pk_celery_leases_marks PRIMARY KEY (stored_key, name)
);

CREATE TABLE IF NOT EXISTS celery_leases_records (
	stored_key VARCHAR(255) NOT NULL, 
	task VARCHAR(255) NOT NULL, 
	"key" TEXT NOT NULL, 
	state VARCHAR(16) NOT NULL, 
	fence BIGINT NOT NULL, 
	owner VARCHAR(64) NOT NULL, 
	call_id VARCHAR(255) NOT NULL, 
	retries INTEGER NOT NULL, 
	holder VARCHAR(255) NOT NULL, 
	attempt INTEGER NOT NULL, 
	generation INTEGER DEFAULT '0' NOT NULL, 
	crashes INTEGER DEFAULT '0' NOT NULL, 
	failures INTEGER DEFAULT '0' NOT NULL, 
	quick_retries INTEGER DEFAULT '0' NOT NULL, 
	cooldowns INTEGER DEFAULT '0' NOT NULL, 
	failed_at BIGINT, 
	counted INTEGER DEFAULT '0' NOT NULL, 
	resumes SMALLINT DEFAULT '0' NOT NULL, 
	fingerprint VARCHAR(80), 
	digests TEXT, 
	lease_store VARCHAR(255) NOT NULL, 
	lease_ttl BIGINT NOT NULL, 
	lease_until BIGINT, 
	retry_at BIGINT, 
	result TEXT, 
	reason VARCHAR(255), 
	ended VARCHAR(16), 
	error TEXT, 
	previous_ended VARCHAR(16), 
	previous_error TEXT, 
	previous_host VARCHAR(255), 
	finished_calls TEXT NOT NULL, 
	finished_results TEXT, 
	progress TEXT, 
	message TEXT, 
	publish_at BIGINT, 
	published_at BIGINT, 
	created_at BIGINT NOT NULL, 
	started_at BIGINT NOT NULL, 
	finished_at BIGINT, 
	crashed_at BIGINT, 
	crashed_call VARCHAR(255), 
	expires_at BIGINT, 
	retention BIGINT, 
	CONSTRAINT pk_celery_leases_records PRIMARY KEY (stored_key)
);

CREATE TABLE IF NOT EXISTS celery_leases_version (
	version INTEGER NOT NULL, 
	CONSTRAINT pk_celery_leases_version PRIMARY KEY (version)
);

CREATE INDEX IF NOT EXISTS ix_celery_leases_effects_expires_at ON celery_leases_effects (expires_at);

CREATE INDEX IF NOT EXISTS ix_celery_leases_marks_expires_at ON celery_leases_marks (expires_at);

CREATE INDEX IF NOT EXISTS ix_celery_leases_records_expires_at ON celery_leases_records (expires_at);

CREATE INDEX IF NOT EXISTS ix_celery_leases_records_publish_at ON celery_leases_records (publish_at);

CREATE INDEX IF NOT EXISTS ix_celery_leases_records_state_started_at ON celery_leases_records (state, started_at);

INSERT INTO celery_leases_version (version) SELECT 1 FROM (SELECT 1) AS one WHERE NOT EXISTS (SELECT * FROM celery_leases_version);
