#define KEYHOLE_PATH portable_path
#define KEYHOLE_VECTOR "vector_portable.h"
#include "path.h"
