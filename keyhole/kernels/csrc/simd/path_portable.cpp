#define KEYHOLE_PATH portable_path
#define KEYHOLE_VECTOR "vector_portable.h"
#define KEYHOLE_PROMPT_TILES "prompt_tiles.h"
#include "path.h"
